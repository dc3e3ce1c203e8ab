"""What a machine decides about training: a table of described machines, and the rules one by one."""

import pytest

from nanodag.cli.show import explain_setting, show_config
from nanodag.config import resolve
from nanodag.config.derive import unwise
from nanodag.config.derive_hardware import budget
from nanodag.config.dial import num_parameters
from nanodag.config.hardware_rules import RULES
from nanodag.config.model_size import KNOWN, ModelSize, known_model
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT
from nanodag.host.machine import GIB, machine_of

SHIPPED = PROJECT / "pipeline.yaml"
PRESETS = ("pocket", "small", "single-gpu", "speedrun", "gsm8k-rl")

# machine -> of speedrun's pretraining: device, nodes, ranks, threads, precision, micro-batch, checkpointing
SPEEDRUN = {
    "8xH100": ("cuda", 1, 8, 8, "bf16", 16384, False),
    "2x8xH100": ("cuda", 2, 16, 8, "bf16", 16384, False),
    "1xH200": ("cuda", 1, 1, 8, "bf16", 32768, False),
    "1xB200:16:amx:256GiB": ("cuda", 1, 1, 16, "bf16", 32768, False),
    "4xA100-40GB": ("cuda", 1, 4, 8, "bf16", 8192, False),
    "1x24GB": ("cuda", 1, 1, 8, "bf16", 4096, True),
    "1xT4": ("cuda", 1, 1, 8, "fp32", 2048, True),
    "cpu:2:avx2:8GiB": ("cpu", 1, 1, 2, "fp32", 2048, True),
    "cpu:2:avx512_bf16:24GiB": ("cpu", 1, 1, 2, "bf16", 8192, True),
    "cpu:16:amx:64GiB": ("cpu", 1, 2, 8, "bf16", 4096, False),
    "cpu:64:avx512:256GiB": ("cpu", 1, 8, 8, "fp32", 2048, False),
}
# machine -> of pocket: ranks and threads of pretraining in steps of 8,192 tokens, of SFT in 2,048, and of RL
POCKET = {
    "cpu:1:avx2:4GiB": ((1, 1), (1, 1), (1, 1)),
    "cpu:2:avx2:8GiB": ((2, 1), (1, 2), (1, 2)),
    "cpu:2:avx512_bf16:24GiB": ((2, 1), (1, 2), (1, 2)),
    "cpu:2:avx2:3GiB": ((1, 2), (1, 2), (1, 2)),
    "cpu:3:avx2:8GiB": ((1, 3), (1, 3), (1, 3)),
    "cpu:6:avx2:16GiB": ((2, 3), (1, 6), (1, 6)),
    "cpu:16:amx:64GiB": ((4, 4), (1, 16), (4, 4)),
    "cpu:64:avx512:256GiB": ((4, 16), (1, 64), (4, 16)),
    "1x24GB": ((1, 8), (1, 8), (1, 8)),
    "8xH100": ((1, 64), (1, 64), (1, 64)),
    "2x8xH100": ((1, 64), (1, 64), (1, 64)),
}


def stages_on(machine, preset, *overrides):
    return resolve(SHIPPED, preset, overrides, machine=machine_of(machine)).pipeline.stages


@pytest.mark.parametrize("machine", SPEEDRUN)
def test_a_machine_decides_how_speedrun_is_trained(machine):
    stage = stages_on(machine, "speedrun")["pretrain"]
    resources = stage.resources
    found = (resources.device, resources.nodes, resources.num_ranks, resources.threads, stage.precision)
    assert (*found, stage.micro_batch_tokens, stage.activation_checkpointing) == SPEEDRUN[machine]


@pytest.mark.parametrize("machine", POCKET)
def test_a_small_model_uses_all_cores_or_one_gpu(machine):
    stages = stages_on(machine, "pocket", "pretrain.batch_tokens=8192", "sft.batch_tokens=2048")
    found = [stages[name].resources for name in ("pretrain", "sft", "rl")]
    assert tuple((r.num_ranks, r.threads) for r in found) == POCKET[machine]


@pytest.mark.parametrize("machine", [*SPEEDRUN, *POCKET])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_resolves_on_every_machine_and_says_why(machine, preset):
    resolved = resolve(SHIPPED, preset, machine=machine_of(machine))
    short = machine_of(machine).short
    for name, stage in resolved.pipeline.stages.items():
        resources = stage.resources
        assert resources.num_ranks % resources.nodes == 0, name
        assert f"derived: {short}: " in resolved.origins[f"{name}.resources.threads"]
        if (batch := getattr(stage, "batch_tokens", None)) is not None:
            assert batch % (stage.micro_batch_tokens * resources.num_ranks) == 0, name
            assert stage.micro_batch_tokens % stage.sequence_length == 0, name
    assert [text for text in resolved.warnings if not text.startswith("CORE is left out")] == []


def test_small_memory_differences_change_nothing_that_is_in_a_key():
    described = "1xH100:16:avx512_bf16:128GiB", "1xNVIDIA_H100_NVL@77.5GiB@9.0:16:avx512_bf16:125.25GiB"
    one, other = (stages_on(machine, "speedrun") for machine in described)
    assert one["pretrain"].micro_batch_tokens == other["pretrain"].micro_batch_tokens
    assert one["rl"].optimizer == other["rl"].optimizer
    assert budget(23 * GIB) == budget(24 * GIB) == 16 * GIB
    assert budget(79 * GIB) == 64 * GIB and budget(139 * GIB) == 96 * GIB and budget(8 * GIB) == 6 * GIB


def test_one_word_moves_all_stages_to_the_cpu_and_a_stage_of_its_own_stays():
    stages = stages_on("8xH100", "pocket", "device=cpu", "sft.resources.device=cuda")
    assert {name for name, stage in stages.items() if stage.resources.device == "cuda"} == {"sft"}
    on_cpu = stages_on("cpu:64:avx512_bf16:768GiB", "pocket")
    assert stages["pretrain"] == on_cpu["pretrain"] and stages["rl"] == on_cpu["rl"]


def test_what_multiplies_nothing_holds_no_gpu():
    stages = stages_on("8xH100", "speedrun")
    assert [name for name, stage in stages.items() if stage.resources.device == "cpu"] == ["tokenizer", "report"]
    assert stages_on("8xH100", "gsm8k-rl")["base"].resources.device == "cpu"


def test_the_same_preset_is_the_default_on_every_machine():
    for machine in ("cpu:2:avx2:8GiB", "8xH100"):
        resolved = resolve(SHIPPED, machine=machine_of(machine))
        assert (resolved.pipeline.preset, resolved.origins["preset"]) == ("pocket", "the file's default")


def test_adamw_is_offloaded_where_its_states_would_fill_the_gpu_and_muon_never():
    given = ["pretrain.optimizer.name=adamw", "pretrain.shape.depth=24"]
    assert stages_on("1x24GB", "speedrun", *given)["pretrain"].resources.offload_optimizer == "cpu"
    assert stages_on("8xH100", "speedrun", *given)["pretrain"].resources.offload_optimizer == "none"
    assert (
        stages_on("1x24GB", "speedrun", *given, "pretrain.zero_stage=0")["pretrain"].resources.offload_optimizer
        == "none"
    )
    assert stages_on("1x24GB", "speedrun")["pretrain"].resources.offload_optimizer == "none"


def test_rl_of_a_known_import_fits_24_gb_by_offload_and_checkpointing_and_80_gb_without():
    small, large = (stages_on(machine, "gsm8k-rl")["rl"] for machine in ("1x24GB", "1xH100"))
    assert (small.resources.offload_optimizer, small.optimizer.activation_checkpointing) == ("cpu", True)
    assert (large.resources.offload_optimizer, large.optimizer.activation_checkpointing) == ("none", False)


def test_a_micro_batch_of_rl_holds_a_whole_rollout_however_small_the_machine():
    given = ["rl.sampler.context=32768", "rl.optimizer.micro_batch_tokens=auto"]
    for machine in ("cpu:2:avx2:8GiB", "1xT4", "8xH100"):
        assert stages_on(machine, "gsm8k-rl", *given)["rl"].optimizer.micro_batch_tokens == 32768


def test_a_model_of_unknown_size_gets_careful_values():
    given = ["base.model=file:/m", "rl.optimizer.micro_batch_tokens=auto"]
    stage = stages_on("8xH100", "gsm8k-rl", *given)["rl"]
    assert (stage.resources.num_ranks, stage.optimizer.micro_batch_tokens) == (8, 9216)
    assert (
        "unknown size"
        in resolve(SHIPPED, "gsm8k-rl", given, machine=machine_of("8xH100")).origins["rl.optimizer.micro_batch_tokens"]
    )


def test_layers_are_compiled_where_that_is_known_to_pay():
    assert stages_on("cpu:2:avx2:8GiB", "pocket")["pretrain"].compile is True
    assert stages_on("cpu:2:avx2:8GiB", "small")["rl"].optimizer.compile is False
    assert stages_on("cpu:2:avx512_bf16:8GiB", "small")["rl"].optimizer.compile is True
    old = "1xOld@12GiB@6.1:8:avx2:32GiB"
    assert stages_on(old, "small")["pretrain"].compile is False
    assert stages_on(old, "small")["rl"].optimizer.compile is False


def test_ranks_that_share_rows_come_in_their_number():
    assert stages_on("8xH100", "gsm8k-rl", "rl.sequence_parallel=4")["rl"].resources.num_ranks == 8
    assert stages_on("cpu:2:avx2:8GiB", "gsm8k-rl", "rl.sequence_parallel=2")["rl"].resources.num_ranks == 2


def test_gpus_of_a_stage_are_refused_on_a_machine_without():
    with pytest.raises(ConfigError, match=r"rl\.resources\.gpus_per_node: 2, and this machine has no GPU"):
        stages_on("cpu:2:avx2:8GiB", "pocket", "rl.resources.gpus_per_node=2")


@pytest.mark.parametrize(
    ("machine", "given", "said"),
    [
        (
            "cpu:2:avx2:8GiB",
            ["pretrain.precision=bf16", "sft.precision=bf16"],
            "pretrain.precision, sft.precision: bf16, which cpu:2:avx2:8GiB emulates",
        ),
        ("8xH100", ["pretrain.precision=fp32"], "pretrain.precision: fp32, which 8xH100 multiplies many times slower"),
        (
            "2x8xH100",
            ["pretrain.resources.num_ranks=16", "pretrain.resources.nodes=1"],
            "pretrain.resources.num_ranks: 16 ranks a node, and 2x8xH100",
        ),
        ("cpu:2:avx2:8GiB", ["pretrain.resources.num_ranks=4"], "4 ranks of 1 thread take turns on 2 cores"),
        ("cpu:2:avx2:8GiB", ["pretrain.resources.threads=2"], "2 ranks of 2 threads take turns on 2 cores"),
    ],
)
def test_what_is_set_by_hand_is_kept_and_said_once_where_it_is_a_bad_idea(machine, given, said):
    resolved = resolve(SHIPPED, "pocket", given, machine=machine_of(machine))
    (warning,) = resolved.warnings
    assert said in warning
    for text in given:
        name, _, value = text.partition("=")
        assert str(dict(_leaves(resolved))[name]) == value


def _leaves(resolved):
    from nanodag.config.resolve import leaves

    return leaves(resolved.pipeline)


def test_what_is_meant_for_another_machine_is_not_warned_of():
    resolved = resolve(SHIPPED, "pocket", ["pretrain.precision=bf16"], machine=machine_of("cpu:2:avx2:8GiB"))
    pretrain = resolved.pipeline.stages["pretrain"]
    pool = pretrain.resources.model_copy(update={"work_pool": "gpus"})
    elsewhere = resolved.pipeline.model_copy(
        update={"stages": {"pretrain": pretrain.model_copy(update={"resources": pool})}}
    )
    assert unwise(elsewhere, resolved.machine, {"pretrain.precision"}) == ()


# Parameters as their authors publish them, in millions.
PUBLISHED = {
    **{"Qwen/Qwen2.5-0.5B": 494, "Qwen/Qwen2.5-1.5B": 1544, "Qwen/Qwen2.5-3B": 3086, "Qwen/Qwen2.5-7B": 7616},
    **{"Qwen/Qwen3-0.6B": 596, "Qwen/Qwen3-1.7B": 1721, "Qwen/Qwen3-4B": 4022, "Qwen/Qwen3-8B": 8191},
    **{"HuggingFaceTB/SmolLM2-135M": 134.5, "HuggingFaceTB/SmolLM2-360M": 361.8, "HuggingFaceTB/SmolLM2-1.7B": 1711},
    **{"meta-llama/Llama-3.2-1B": 1236, "meta-llama/Llama-3.2-3B": 3213},
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_models_shape_has_the_parameters_that_its_authors_publish(name):
    assert num_parameters(*KNOWN[name])["total"] / 1e6 == pytest.approx(PUBLISHED[name], rel=0.002)


def test_a_known_model_is_found_under_its_variants_and_no_other():
    assert known_model("hub:Qwen/Qwen2.5-0.5B-Instruct@main") == ModelSize(*KNOWN["Qwen/Qwen2.5-0.5B"], 32_768)
    assert known_model("hub:Qwen/Qwen3-8B-Base") == ModelSize(*KNOWN["Qwen/Qwen3-8B"], 32_768)
    assert known_model("hub:other/Qwen3-8B") is None and known_model("file:/Qwen/Qwen3-8B") is None


def test_sglang_is_the_engine_where_the_machine_is_said_to_have_it():
    host = "8xH100:64:avx512_bf16:768GiB"
    engines = [stages_on(machine, "speedrun")["rl"].sampler.engine for machine in (host, f"{host}+sglang")]
    assert engines == ["embedded", "sglang"]


def test_one_setting_is_explained_with_its_machine_rule_and_reason(capsys):
    explain_setting("pretrain.num_ranks", [], preset="speedrun", file=str(SHIPPED), on="8xH100")
    said = capsys.readouterr().out
    assert "value     8    # derived: 8xH100: all GPUs, as long as a step has 10 TFLOP for each" in said
    assert f"why       {RULES['ranks_cuda'].reason}" in said


def test_config_shows_another_machine_and_what_is_a_bad_idea_there(capsys):
    show_config(["pretrain.precision=fp32"], preset="pocket", file=str(SHIPPED), on="1x24GB")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("preset pocket, on 1x24GB:8:avx512_bf16:96GiB")
    assert lines[1].startswith("Warning: pretrain.precision: fp32, which 1x24GB multiplies many times slower")
    assert "  resources.device = cuda    # derived: 1x24GB: the pipeline's `device`" in lines


def test_every_rule_names_a_setting_and_has_a_reason():
    for rule in RULES.values():
        assert rule.setting and rule.rule and rule.reason.endswith(".")
