"""What `auto` becomes on described machines: a table of settings, and the rules that no single value shows."""

from dataclasses import replace

import pytest

from nanodag.cli.show import explain_setting, show_config
from nanodag.config import resolve
from nanodag.config.derive import RULES, budget
from nanodag.config.model_size import KNOWN, known_model
from nanodag.config.resolve import leaves
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT
from nanodag.host.machine import GIB, machine_of
from nanodag.plan.make import plan_of
from nanodag.plan.stage_plan import Process, StagePlan

SHIPPED = PROJECT / "pipeline.yaml"
LAPTOP, SERVER = "cpu:2:avx2:8GiB", "cpu:2:avx512_bf16:8GiB"
OLD = "1xOld@12GiB@6.1:8:avx2:32GiB"
ADAMW = "pretrain.optimizer.name=adamw pretrain.shape.depth=24"
IN_STEPS = "pretrain.batch_tokens=8192 sft.batch_tokens=2048"
SEPARATE = "rl.placement=separate"
# machine -> of speedrun's pretraining: device, nodes, ranks, threads, precision, micro-batch, checkpointing
SPEEDRUN = {
    "8xH100": ("cuda", 1, 8, 8, "bf16", 16384, False), "2x8xH100": ("cuda", 2, 16, 8, "bf16", 16384, False),
    "1xH200": ("cuda", 1, 1, 8, "bf16", 32768, False),
    "1xB200:16:amx:256GiB": ("cuda", 1, 1, 16, "bf16", 32768, False),
    "4xA100-40GB": ("cuda", 1, 4, 8, "bf16", 8192, False), "1x24GB": ("cuda", 1, 1, 8, "bf16", 4096, True),
    "1xT4": ("cuda", 1, 1, 8, "fp32", 2048, True), LAPTOP: ("cpu", 1, 1, 2, "fp32", 2048, True),
    "cpu:2:avx512_bf16:24GiB": ("cpu", 1, 1, 2, "bf16", 8192, True),
    "cpu:16:amx:64GiB": ("cpu", 1, 2, 8, "bf16", 4096, False),
    "cpu:64:avx512:256GiB": ("cpu", 1, 8, 8, "fp32", 2048, False),
}  # fmt: skip
TRAINED = (
    "pretrain.resources.device pretrain.resources.nodes pretrain.resources.num_ranks pretrain.resources.threads "
    "pretrain.precision pretrain.micro_batch_tokens pretrain.activation_checkpointing"
)
# machine -> of pocket: ranks and threads of pretraining in steps of 8,192 tokens, of SFT in 2,048, and of RL
POCKET = {
    "cpu:1:avx2:4GiB": (1, 1, 1, 1, 1, 1), LAPTOP: (2, 1, 1, 2, 1, 2), "cpu:2:avx512_bf16:24GiB": (2, 1, 1, 2, 1, 2),
    "cpu:2:avx2:3GiB": (1, 2, 1, 2, 1, 2), "cpu:3:avx2:8GiB": (1, 3, 1, 3, 1, 3),
    "cpu:6:avx2:16GiB": (2, 3, 1, 6, 1, 6), "cpu:16:amx:64GiB": (4, 4, 1, 16, 4, 4),
    "cpu:64:avx512:256GiB": (4, 16, 1, 64, 4, 16), "1x24GB": (1, 8, 1, 8, 1, 8), "8xH100": (1, 64, 1, 64, 1, 64),
    "2x8xH100": (1, 64, 1, 64, 1, 64),
}  # fmt: skip
SPREAD = " ".join(
    f"{stage}.resources.{name}" for stage in ("pretrain", "sft", "rl") for name in ("num_ranks", "threads")
)
PRECISIONS = "rl.optimizer.precision rl.sampler.precision eval_base.precision eval_rl.precision"
PLACED = "rl.placement rl.resources.offload_optimizer rl.lends_states rl.sampler.gpus rl.sampler.memory_fraction"
OWN = "rl.resources.num_ranks rl.sampler.gpus rl.sampler.replicas rl.sampler.memory_fraction"
OFFLOADED = "pretrain.resources.offload_optimizer"
# preset, machine, overrides, settings, their values
ROWS = [
    *(("speedrun", machine, "", TRAINED, values) for machine, values in SPEEDRUN.items()),
    *(("pocket", machine, IN_STEPS, SPREAD, values) for machine, values in POCKET.items()),
    # precision: bf16 where it is fast; RL of a narrow model on a CPU, and evaluation there, in fp32
    ("pocket", "cpu:2:avx512:8GiB", "", "pretrain.precision sft.precision", ("fp32", "fp32")),
    ("pocket", "cpu:2:amx:8GiB", "", "pretrain.precision sft.precision", ("bf16", "bf16")),
    ("pocket", SERVER, "", PRECISIONS, ("fp32", "fp32", "fp32", "fp32")),  # width 192
    ("small", SERVER, "", PRECISIONS, ("bf16", "bf16", "fp32", "fp32")),  # width 256
    ("pocket", "1x24GB", "", PRECISIONS, ("bf16", "bf16", "bf16", "bf16")),
    ("pocket", "1xT4", "", PRECISIONS, ("fp32", "fp32", "fp32", "fp32")),
    ("pocket", LAPTOP, "rl.optimizer.precision=bf16 eval_rl.precision=bf16", PRECISIONS,
     ("bf16", "bf16", "fp32", "bf16")),
    # AdamW is offloaded where its states would fill the GPU, and Muon never
    ("speedrun", "1x24GB", ADAMW, OFFLOADED, ("cpu",)),
    ("speedrun", "8xH100", ADAMW, OFFLOADED, ("none",)),
    ("speedrun", "1x24GB", f"{ADAMW} pretrain.zero_stage=0", OFFLOADED, ("none",)),
    ("speedrun", "1x24GB", "", OFFLOADED, ("none",)),
    ("gsm8k-rl", "1x24GB", "", "rl.resources.offload_optimizer rl.optimizer.activation_checkpointing", ("cpu", True)),
    ("gsm8k-rl", "1xH100", "", "rl.resources.offload_optimizer rl.optimizer.activation_checkpointing", ("none", False)),
    # layers are compiled where that is known to pay
    ("pocket", LAPTOP, "", "pretrain.compile", (True,)),
    ("small", LAPTOP, "", "rl.optimizer.compile", (False,)),
    ("small", SERVER, "", "rl.optimizer.compile", (True,)),
    ("small", OLD, "", "pretrain.compile rl.optimizer.compile", (False, False)),
    # a micro-batch of RL holds a whole rollout; a model of unknown size gets careful values
    *(("gsm8k-rl", machine, "rl.sampler.context=32768 rl.optimizer.micro_batch_tokens=auto",
       "rl.optimizer.micro_batch_tokens", (32768,)) for machine in (LAPTOP, "1xT4", "8xH100")),
    ("gsm8k-rl", "8xH100", "base.model=file:/m rl.optimizer.micro_batch_tokens=auto",
     "rl.resources.num_ranks rl.optimizer.micro_batch_tokens", (8, 9216)),
    # ranks that share rows come in their number; SGLang where the machine is said to have it
    ("gsm8k-rl", "8xH100", "rl.sequence_parallel=2", "rl.resources.num_ranks", (8,)),
    ("gsm8k-rl", LAPTOP, "rl.sequence_parallel=2", "rl.resources.num_ranks", (2,)),
    ("speedrun", "8xH100:64:avx512_bf16:768GiB", "", "rl.sampler.engine", ("embedded",)),
    ("speedrun", "8xH100:64:avx512_bf16:768GiB+sglang", "", "rl.sampler.engine", ("sglang",)),
    # samplers are beside the trainer unless turns keep the optimizer on the GPU: weights, gradients and AdamW's states
    # are 12 GiB, over half of 0.6 of 31, not of 0.9
    ("gsm8k-rl", "8xH100+sglang", "", PLACED, ("beside", "none", False, (), 0.4)),
    ("gsm8k-rl", "1x24GB+sglang", "", PLACED, ("beside", "cpu", False, (), 0.4)),
    ("speedrun", "8xH100", "", PLACED, ("beside", "none", False, (), 0.4)),
    ("pocket", LAPTOP, "", PLACED, ("beside", "none", False, (), 0.25)),
    ("gsm8k-rl", "1xL40S+sglang", "", PLACED, ("shared", "none", True, (), 0.8)),
    ("gsm8k-rl", "1xA100-40GB", "", PLACED, ("shared", "none", True, (), 0.8)),
    ("gsm8k-rl", "1xL40S+sglang", "rl.max_staleness=1", PLACED, ("beside", "cpu", False, (), 0.4)),
    ("gsm8k-rl", "1xL40S+sglang", "rl.placement=beside", PLACED, ("beside", "cpu", False, (), 0.4)),
    ("gsm8k-rl", "1xL40S+sglang", "rl.rollout.source=file:/r rl.evaluation.validation=[]", PLACED,
     ("beside", "none", False, (), 0.4)),
    ("gsm8k-rl", "1xL40S+sglang", "rl.lends_states=false", PLACED, ("beside", "cpu", False, (), 0.4)),
    ("gsm8k-rl", "4xL40S+sglang", "", PLACED, ("beside", "none", False, (), 0.4)),
    ("gsm8k-rl", "1xH100+sglang", "base.model=hub:Qwen/Qwen2.5-7B", PLACED, ("beside", "cpu", False, (), 0.4)),
    ("gsm8k-rl", "1xH100", "base.model=file:/m", PLACED, ("beside", "none", False, (), 0.4)),
    # GPUs of samplers are not the trainer's, and replicas follow from them
    ("gsm8k-rl", "8xH100+sglang", SEPARATE, OWN, (4, (4, 5, 6, 7), 4, 0.9)),
    ("gsm8k-rl", "8xH100+sglang", f"{SEPARATE} rl.sampler.gpus=2", OWN, (6, (6, 7), 2, 0.9)),
    ("gsm8k-rl", "8xH100+sglang", f"{SEPARATE} rl.sampler.gpus=4 rl.sampler.tensor_parallel=2", OWN,
     (4, (4, 5, 6, 7), 2, 0.9)),
    ("gsm8k-rl", "8xH100+sglang", f"{SEPARATE} rl.sampler.gpus=[0,3]", OWN, (6, (0, 3), 2, 0.9)),
    ("gsm8k-rl", "8xH100+sglang", f"{SEPARATE} rl.sampler.gpus=2 rl.num_ranks=1", OWN, (1, (6, 7), 2, 0.9)),
    ("gsm8k-rl", "8xH100+sglang", f"{SEPARATE} rl.sampler.gpus=7 rl.num_ranks=1", OWN,
     (1, (1, 2, 3, 4, 5, 6, 7), 7, 0.9)),
]  # fmt: skip


def resolved_on(machine, preset, overrides=""):
    return resolve(SHIPPED, preset, overrides.split(), machine=machine_of(machine))


def stages_on(machine, preset, overrides=""):
    return resolved_on(machine, preset, overrides).pipeline.stages


@pytest.mark.parametrize(("preset", "machine", "overrides", "settings", "values"), ROWS)
def test_auto_follows_from_the_machine(preset, machine, overrides, settings, values):
    resolved = resolved_on(machine, preset, overrides)
    found = dict(leaves(resolved.pipeline))
    assert tuple(found[name] for name in settings.split()) == values
    assert all(resolved.origins[name] for name in settings.split())
    if overrides.startswith(SEPARATE):
        assert resolved.pipeline.stages["rl"].num_gpus(8) == 8


@pytest.mark.parametrize("machine", dict.fromkeys([*SPEEDRUN, *POCKET]))
@pytest.mark.parametrize("preset", ["pocket", "small", "single-gpu", "speedrun", "gsm8k-rl"])
def test_every_preset_resolves_on_every_machine_and_says_why(machine, preset):
    resolved = resolved_on(machine, preset)
    short = machine_of(machine).short
    for name, stage in resolved.pipeline.stages.items():
        resources = stage.resources
        assert resources.num_ranks % resources.nodes == 0, name
        assert f"derived: {short}: " in resolved.origins[f"{name}.resources.threads"]
        if (batch := getattr(stage, "batch_tokens", None)) is not None:
            assert batch % (stage.micro_batch_tokens * resources.num_ranks) == 0, name
            assert stage.micro_batch_tokens % stage.sequence_length == 0, name
        for section in (stage, getattr(stage, "sampler", None)):
            assert getattr(section, "precision", "fp32") in ("fp32", "bf16"), name
    assert [text for text in resolved.warnings if not text.startswith("CORE is left out")] == []
    assert resolved.pipeline.stages["rl"].sampler.deterministic == (machine_of(machine).gpu is None)
    for field in ("engine", "replicas", "precision", "deterministic", "cache_bytes", "memory_fraction"):
        assert resolved.origins[f"rl.sampler.{field}"].startswith("derived: "), field


def test_small_memory_differences_change_nothing_that_is_in_a_key():
    described = "1xH100:16:avx512_bf16:128GiB", "1xNVIDIA_H100_NVL@77.5GiB@9.0:16:avx512_bf16:125.25GiB"
    first, second = (stages_on(machine, "speedrun") for machine in described)
    assert first["pretrain"].micro_batch_tokens == second["pretrain"].micro_batch_tokens
    assert first["rl"].optimizer == second["rl"].optimizer
    assert budget(23 * GIB) == budget(24 * GIB) == 16 * GIB
    assert budget(79 * GIB) == 64 * GIB and budget(139 * GIB) == 96 * GIB and budget(8 * GIB) == 6 * GIB


def test_one_word_moves_all_stages_to_the_cpu_a_stage_of_its_own_stays_and_what_multiplies_nothing_is_there():
    stages = stages_on("8xH100", "pocket", "device=cpu sft.resources.device=cuda")
    assert {name for name, stage in stages.items() if stage.resources.device == "cuda"} == {"sft"}
    on_cpu = stages_on("cpu:64:avx512_bf16:768GiB", "pocket")
    assert stages["pretrain"] == on_cpu["pretrain"] and stages["rl"] == on_cpu["rl"]
    devices = {name: stage.resources.device for name, stage in stages_on("8xH100", "speedrun").items()}
    assert [name for name, device in devices.items() if device == "cpu"] == ["tokenizer", "report"]
    assert stages_on("8xH100", "gsm8k-rl")["base"].resources.device == "cpu"


@pytest.mark.parametrize("machine", [LAPTOP, "8xH100"])
def test_the_same_preset_is_the_default_on_every_machine(machine):
    resolved = resolve(SHIPPED, machine=machine_of(machine))
    assert (resolved.pipeline.preset, resolved.origins["preset"]) == ("pocket", "the file's default")


@pytest.mark.parametrize(("machine", "overrides", "message"), [
    (LAPTOP, "rl.resources.gpus_per_node=2", r"rl\.resources\.gpus_per_node: 2, and this machine has no GPU"),
    *(("8xH100", f"{SEPARATE} rl.sampler.gpus={gpus}", r"sampler\.gpus")
      for gpus in ("8", "[0,8]", "[1,1]", "[]", "[0,1,2,3,4,5,6,7]")),
])  # fmt: skip
def test_gpus_that_are_not_there_or_leave_the_trainer_none_are_refused(machine, overrides, message):
    with pytest.raises(ConfigError, match=message):
        stages_on(machine, "gsm8k-rl", overrides)


@pytest.mark.parametrize(("machine", "given", "said"), [
    (LAPTOP, "pretrain.precision=bf16 sft.precision=bf16",
     f"pretrain.precision, sft.precision: bf16, which {LAPTOP} emulates"),
    ("8xH100", "pretrain.precision=fp32", "pretrain.precision: fp32, which 8xH100 multiplies many times slower"),
    ("2x8xH100", "pretrain.resources.num_ranks=16 pretrain.resources.nodes=1",
     "pretrain.resources.num_ranks: 16 ranks a node, and 2x8xH100"),
    (LAPTOP, "pretrain.resources.num_ranks=4", "4 ranks of 1 thread take turns on 2 cores"),
    (LAPTOP, "pretrain.resources.threads=2", "2 ranks of 2 threads take turns on 2 cores"),
])  # fmt: skip
def test_what_is_set_by_hand_is_kept_and_said_once_where_it_is_a_bad_idea(machine, given, said):
    resolved = resolved_on(machine, "pocket", given)
    (warning,) = resolved.warnings
    assert said in warning
    for text in given.split():
        name, _, value = text.partition("=")
        assert str(dict(leaves(resolved.pipeline))[name]) == value


def test_what_is_meant_for_another_machine_is_not_warned_of():
    pool = "pretrain.work_pool=gpus pretrain.device=cpu server.database=postgresql+asyncpg://u@h/d"
    assert resolved_on(LAPTOP, "pocket", "pretrain.precision=bf16").warnings
    assert not resolved_on(LAPTOP, "pocket", f"pretrain.precision=bf16 {pool}").warnings


# Parameters as their authors publish them, in millions.
PUBLISHED = {
    **{"Qwen/Qwen2.5-0.5B": 494, "Qwen/Qwen2.5-1.5B": 1544, "Qwen/Qwen2.5-3B": 3086, "Qwen/Qwen2.5-7B": 7616},
    **{"Qwen/Qwen3-0.6B": 596, "Qwen/Qwen3-1.7B": 1721, "Qwen/Qwen3-4B": 4022, "Qwen/Qwen3-8B": 8191},
    **{"HuggingFaceTB/SmolLM2-135M": 134.5, "HuggingFaceTB/SmolLM2-360M": 361.8, "HuggingFaceTB/SmolLM2-1.7B": 1711},
    **{"meta-llama/Llama-3.2-1B": 1236, "meta-llama/Llama-3.2-3B": 3213},
}


def test_a_known_model_has_its_authors_parameters_and_is_found_under_its_variants_and_no_other():
    for name, model in KNOWN.items():
        assert model.total / 1e6 == pytest.approx(PUBLISHED[name], rel=0.002), name
    assert known_model("hub:Qwen/Qwen2.5-0.5B-Instruct@main") == replace(
        KNOWN["Qwen/Qwen2.5-0.5B"], max_positions=32_768
    )
    assert known_model("hub:Qwen/Qwen3-8B-Base") == replace(KNOWN["Qwen/Qwen3-8B"], max_positions=32_768)
    assert known_model("hub:other/Qwen3-8B") is None and known_model("file:/Qwen/Qwen3-8B") is None


def test_one_setting_is_explained_with_its_machine_rule_and_reason(capsys):
    explain_setting("pretrain.num_ranks", [], preset="speedrun", file=str(SHIPPED), on="8xH100")
    said = capsys.readouterr().out
    assert "value     8    # derived: 8xH100: all GPUs, as long as a step has 10 TFLOP for each" in said
    assert f"why       {RULES['ranks_cuda'].reason}" in said
    assert all(rule.setting and rule.rule and rule.reason.endswith(".") for rule in RULES.values())


def test_config_shows_another_machine_and_what_is_a_bad_idea_there(capsys):
    show_config(["pretrain.precision=fp32"], preset="pocket", file=str(SHIPPED), on="1x24GB")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("preset pocket, on 1x24GB:8:avx512_bf16:96GiB")
    assert lines[1].startswith("Warning: pretrain.precision: fp32, which 1x24GB multiplies many times slower")
    assert "  resources.device = cuda    # derived: 1x24GB: the pipeline's `device`" in lines


def test_samplers_of_other_nodes_have_all_of_their_gpus(tmp_path):
    given = f"{SEPARATE} rl.sampler.nodes=2 rl.nodes=1 rl.sampler.tensor_parallel=2"
    with pytest.raises(ConfigError, match=r"sampler\.nodes 2 needs cluster\.hostfile"):
        stages_on("3x8xH100+sglang", "gsm8k-rl", given)
    (tmp_path / "pipeline.yaml").write_text("cluster: {hostfile: /hosts}\n" + SHIPPED.read_text())
    machine = machine_of("3x8xH100+sglang")
    stage = resolve(tmp_path / "pipeline.yaml", "gsm8k-rl", given.split(), machine=machine).pipeline.stages["rl"]
    assert (stage.resources.num_ranks, stage.sampler.replicas, stage.sampler.gpus) == (8, 8, ())
    assert stage.num_gpus(8) == 8


@pytest.mark.parametrize("placement", ["beside", "shared", "separate"])
@pytest.mark.parametrize("machine", ["8xH100+sglang", "8xH100", "2x24GB+sglang"])
def test_a_preset_fits_its_machines_in_every_placement(machine, placement):
    resolved = resolved_on(machine, "gsm8k-rl", f"rl.placement={placement}")
    (plan,) = plan_of(resolved.pipeline, resolved.machine, stages=["rl"]).stages
    trainer, sampler = plan.processes[:2]
    resting = (trainer.resting or 0, sampler.resting or 0)
    together = {
        "beside": trainer.on_device + sampler.on_device,
        "shared": max(trainer.on_device + resting[1], sampler.on_device + resting[0]),
        "separate": max(trainer.on_device, sampler.on_device),
    }[placement]
    assert not plan.faults and plan.device_bytes == together and bool(sum(resting)) == (placement == "shared")
    if placement == "shared":
        assert trainer.host["lent"] > trainer.device["optimizer"] * (machine[0] == "8") and sampler.resting < 12 << 30


def test_a_gpu_in_turns_is_as_full_as_in_its_fullest_turn_and_processes_that_share_one_add_up():
    trainer = Process(name="trainer", count=4, device={"all": 60}, gpus=1, resting=5)
    sampler = Process(name="sampler", count=2, device={"all": 50}, gpus=2, resting=7)
    beside = Process(name="other", count=4, device={"all": 1}, gpus=1)
    plan = {"name": "rl", "kind": "rl", "device": "cuda", "num_gpus": 4}
    assert StagePlan(**plan, processes=(trainer, sampler, beside)).device_bytes == 60 + 7 + 1
    own = Process(name="sampler", count=2, device={"all": 90}, gpus=2, own_gpus=2)
    alone = Process(name="trainer", count=2, device={"all": 60}, gpus=1, own_gpus=2)
    assert StagePlan(**plan, processes=(alone, own)).device_bytes == 180
    rank, scorer = Process(name="rank", count=8, device={"a": 10}, gpus=1), Process(name="s", device={"b": 5}, gpus=1)
    assert StagePlan(**plan | {"num_gpus": 8}, processes=(rank, scorer)).device_bytes == 15
    assert StagePlan(**plan, processes=(rank,)).device_bytes == 20
