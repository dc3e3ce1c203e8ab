"""What samplers get on described machines: engine, replicas, determinism, batch, context, memory."""

from dataclasses import replace

import pytest

from nanodag.config import derive_sampler as derive_sampler_module
from nanodag.config.derive_sampler import derive_evaluation, derive_sampler, this_machine
from nanodag.config.dial import shape_of
from nanodag.config.kinds.evaluation import EvalStage
from nanodag.config.kinds.rl import RLStage
from nanodag.config.model_size import ModelSize, known_model
from nanodag.config.rl_checks import check
from nanodag.errors import ConfigError
from nanodag.external_envs.package_environment import PackageEnvironment
from nanodag.host.machine import GIB, machine_of
from nanodag.model.build import qwen3_architecture
from nanodag.sampler.slots import plan_cache

DEPTH_24 = ModelSize(shape_of(24), 32768, 4096)
DEPTH_12 = ModelSize(shape_of(12), 32768, 4096)
QWEN = known_model("hub:Qwen/Qwen2.5-0.5B")


def stage_on(machine, *, ranks=None, precision=None, **settings):
    """An RL stage whose resources are resolved, as derive gives it."""
    resources = {"num_ranks": ranks or machine.num_gpus or 1, "threads": machine.cores, "device": machine.device}
    precision = precision or ("bf16" if machine.multiplies_bf16_fast(machine.device) else "fp32")
    table = {"kind": "rl", "data": ["file:x"], "resources": resources, "precision": precision, **settings}
    return RLStage.of(**table)


def sampler_on(text, model=DEPTH_12, *, sglang=True, origins=None, **settings):
    machine = machine_of(f"{text}+sglang" if sglang else text)
    stage = stage_on(machine, **settings)
    return derive_sampler("rl", stage, machine, model, {} if origins is None else origins)


@pytest.mark.parametrize(("text", "engine", "replicas", "is_exact", "precision"), [
    ("8xH100", "sglang", 8, False, "bf16"), ("4xH100", "sglang", 4, False, "bf16"),
    ("1xH200", "sglang", 1, False, "bf16"), ("2xB200", "sglang", 2, False, "bf16"),
    ("1x24GB", "sglang", 1, False, "bf16"), ("8xA100-40GB", "sglang", 8, False, "bf16"),
    ("1xT4", "embedded", 1, False, "fp32"), ("2xT4", "embedded", 2, False, "fp32"),
    ("cpu:2:avx2:16GiB", "embedded", 2, True, "fp32"), ("cpu:1:avx512_bf16:4GiB", "embedded", 1, True, "bf16"),
    ("cpu:64:amx:256GiB", "embedded", 4, True, "bf16"),
])  # fmt: skip
def test_engine_replicas_determinism_and_precision_follow_from_the_machine(text, engine, replicas, is_exact, precision):
    origins = {}
    stage = sampler_on(text, origins=origins)
    sampler = stage.sampler
    found = (sampler.engine, sampler.replicas, sampler.deterministic, sampler.precision)
    assert found == (engine, replicas, is_exact, precision)
    assert stage.weights.sync_check_every == (0 if engine == "sglang" else 20)
    assert sampler.start_timeout_s == (900 if engine == "sglang" else 120)
    check(stage)
    left = {name for name, value in sampler.model_dump().items() if value == "auto"}
    assert left == {"python", "gpus"} and all(why.startswith("derived: ") for why in origins.values())


FOUR = {"placement": "separate", "sampler": {"gpus": (4, 5, 6, 7)}, "ranks": 4}


@pytest.mark.parametrize(("text", "settings", "expected"), [
    # Handles where each engine is on a rank's GPU: NCCL refuses two processes there.
    ("8xH100", {"placement": "shared"}, ("ipc", "gloo")),
    ("8xH100", {"placement": "beside"}, ("ipc", "gloo")),
    ("1x24GB", {"placement": "beside"}, ("ipc", "gloo")),
    ("8xH100", {"placement": "beside", "sampler": {"tensor_parallel": 4}}, ("ipc", "gloo")),
    ("8xH100", {"placement": "beside", "sglang": False}, ("ipc", "gloo")),
    # NCCL where each has a GPU of its own, here or on other nodes.
    ("8xH100", FOUR, ("distributed", "nccl")),
    ("8xH100", {**FOUR, "sampler": {"gpus": (4, 5, 6, 7), "tensor_parallel": 2}}, ("distributed", "nccl")),
    ("8xH100", {"placement": "separate", "sampler": {"nodes": 2, "gpus": ()}}, ("distributed", "nccl")),
    # A folder for all else.
    ("cpu:2:avx2:16GiB", {"placement": "beside"}, ("disk", "gloo")),
    ("cpu:2:avx2:16GiB", {"placement": "separate", "sampler": {"nodes": 1}}, ("disk", "gloo")),
    ("8xH100", {"placement": "beside", "ranks": 4, "sampler": {"replicas": 8}}, ("disk", "gloo")),
    ("8xH100", {"placement": "beside", "sampler": {"urls": ["http://node2:30000"]}}, ("disk", "gloo")),
    ("8xH100", {"placement": "beside", "sampler": {"urls_file": "/urls", "replicas": 2}}, ("disk", "gloo")),
    ("8xH100", {"placement": "beside", "only": "rollouts"}, ("disk", "gloo")),
    # What is said stays.
    ("8xH100", {"placement": "beside", "sync": "disk"}, ("disk", "gloo")),
    ("8xH100", {**FOUR, "sync": "distributed"}, ("distributed", "gloo")),
    ("cpu:2:avx2:16GiB", {"placement": "beside", "sync": "ipc"}, ("ipc", "gloo")),
])  # fmt: skip
def test_weights_go_by_handles_on_shared_gpus_by_nccl_to_others_and_else_by_a_folder(text, settings, expected):
    origins = {}
    stage = sampler_on(text, origins=origins, **settings)
    assert (stage.weights.sync, stage.weights.sync_backend) == expected
    assert ("rl.weights.sync" in origins) == ("sync" not in settings)
    check(stage)
    assert RLStage.model_validate(stage.model_dump()) == stage, "a record of it is read again"


WINDOWED, NARROW_HEADS = replace(DEPTH_12, window=256), ModelSize(shape_of(3), 2048, 512)


@pytest.mark.parametrize(("text", "model", "options", "engine"), [
    ("8xH100", WINDOWED, {}, "embedded"),  # a window shorter than the context is not given to SGLang
    ("8xH100", replace(DEPTH_12, window=4096), {"sampler": {"engine": "sglang"}}, "sglang"),
    ("1xH100", NARROW_HEADS, {}, "embedded"),  # its kernels have no heads of 32
    ("1xH100", DEPTH_12, {"sglang": False, "sampler": {"python": "/x"}}, "sglang"),  # counts as installed
    ("cpu:2:avx2:8GiB", DEPTH_12, {"sampler": {"python": "/x"}}, "embedded"),
])  # fmt: skip
def test_sglang_is_chosen_where_it_is_there_and_runs_the_model(text, model, options, engine):
    assert sampler_on(text, model, **options).sampler.engine == engine


def test_a_window_that_sglang_would_leave_out_is_refused():
    with pytest.raises(ConfigError, match=r"^rl\.sampler\.engine: sglang leaves out .* window of 256 tokens"):
        sampler_on("8xH100", WINDOWED, sampler={"engine": "sglang"})


def test_without_sglang_a_gpu_gets_the_embedded_engine_and_the_command_that_installs_the_other():
    origins = {}
    stage = sampler_on("8xH100", sglang=False, origins=origins, sampler={"options": {"schedule_policy": "fcfs"}})
    assert (stage.sampler.engine, stage.sampler.replicas, stage.weights.sync_check_every) == ("embedded", 8, 20)
    assert "nanodag sampler install --cuda" in origins["rl.sampler.engine"]
    assert RLStage.model_validate(stage.model_dump()) == stage, "a record of it is read again"


@pytest.mark.parametrize("others", [{"urls": ["http://node2:30000"]}, {"urls_file": "/urls"}])
@pytest.mark.parametrize(("text", "expected"), [
    ("cpu:2:avx2:16GiB", (0, "embedded", True)), ("1x24GB", (0, "sglang", False)),
])  # fmt: skip
def test_with_servers_of_others_a_stage_has_none_of_its_own_unless_it_is_said(text, expected, others):
    sampler = sampler_on(text, sglang=False, sampler=others).sampler
    assert (sampler.replicas, sampler.engine, sampler.deterministic) == expected
    assert sampler.max_batch > 0 and sampler.cache_bytes > 0
    assert sampler_on(text, sglang=False, sampler={**others, "replicas": 1}).sampler.replicas == 1


@pytest.mark.parametrize(("sampler", "said"), [
    ({"urls": ["node2:30000"]}, "not of the form"),
    ({"urls": ["http://node2:1", "http://node2:1/"]}, "http://node2:1 twice"),
    ({"replicas": 0}, "replicas 0 needs servers of others"),
])  # fmt: skip
def test_servers_of_others_that_cannot_be_meant_are_refused(sampler, said):
    with pytest.raises(ValueError, match=said):
        sampler_on("cpu:2:avx2:16GiB", sampler=sampler)


def test_this_machine_says_whether_sglang_is_installed(monkeypatch):
    for text, expected in (("1xH100", "+sglang"), ("cpu:2:avx2:8GiB", "GiB")):
        monkeypatch.setattr(derive_sampler_module, "detect", lambda text=text: machine_of(text))
        monkeypatch.setenv("NANODAG_SGLANG_PYTHON", "/x")
        assert str(this_machine()).endswith(expected)
    monkeypatch.delenv("NANODAG_SGLANG_PYTHON")
    monkeypatch.setattr(PackageEnvironment, "is_installed", lambda environment, folder: False)
    monkeypatch.setattr(derive_sampler_module, "detect", lambda: machine_of("1xH100"))
    assert not this_machine().sglang


def test_what_is_set_by_hand_is_kept():
    given = {"engine": "embedded", "replicas": 3, "max_batch": 7, "context": 600, "cache_bytes": 10**9}
    given |= {"precision": "fp32", "deterministic": False, "memory_fraction": 0.2, "start_timeout_s": 5.0}
    found = sampler_on("8xH100", sampler=given).sampler.model_dump()
    assert {name: found[name] for name in given} == given


def test_a_large_model_is_not_for_the_embedded_engine_where_sglang_is_there():
    large = known_model("hub:Qwen/Qwen2.5-7B")
    asked = {"engine": "embedded"}
    assert sampler_on("1xH200", QWEN, sampler=asked).sampler.engine == "embedded"
    assert sampler_on("1xH200", large, sglang=False, sampler=asked).sampler.engine == "embedded"
    with pytest.raises(ConfigError, match=r"models of up to 2 B parameters, and this one has 7\.6 B; leave it at auto"):
        sampler_on("1xH200", large, sampler=asked)


@pytest.mark.parametrize("sglang", [True, False])
@pytest.mark.parametrize("model", [DEPTH_24, DEPTH_12, QWEN])
@pytest.mark.parametrize("text", ["8xH100", "1xH200", "1x24GB", "1xA100-40GB"])
def test_weights_and_cache_are_within_the_share_whoever_starts_first(text, model, sglang):
    stage = sampler_on(text, model, sglang=sglang, prompts_per_step=64, samples_per_prompt=16)
    sampler, memory = stage.sampler, machine_of(text).gpu.memory
    weights = 2 * model.total * (1 if sampler.engine == "sglang" else 2)
    assert weights + sampler.cache_bytes <= 0.4 * memory
    each = -(-sampler.max_batch // sampler.replicas)
    if sampler.engine == "embedded":
        assert each * sampler.context * model.token_bytes(2) <= sampler.cache_bytes


@pytest.mark.parametrize(("model", "text", "expected"), [
    # Bytes of a token, by hand: 2 x 24 x 12 x 128 x 2, 2 x 12 x 6 x 128 x 2 and 2 x 24 x 2 x 64 x 2.
    (DEPTH_24, "1x24GB", (1280, 147_456, 36)), (DEPTH_24, "1xH100", (1280, 147_456, 163)),
    (DEPTH_12, "1x24GB", (1280, 36_864, 200)), (QWEN, "1x24GB", (1280, 12_288, 256)),
])  # fmt: skip
def test_the_embedded_engine_decodes_as_many_samples_as_its_cache_holds(model, text, expected):
    stage = sampler_on(text, model, sglang=False, prompts_per_step=32, samples_per_prompt=8)
    assert (stage.sampler.context, model.token_bytes(2), stage.sampler.max_batch) == expected
    slots, _ = plan_cache(_architecture(model), stage.sampler.max_batch, 1280, stage.sampler.cache_bytes, 2)
    assert slots == expected[2]


def test_a_batch_that_was_given_and_does_not_fit_is_said():
    origins = {}
    stage = sampler_on("1x24GB", DEPTH_24, sglang=False, origins=origins, sampler={"max_batch": 256})
    assert stage.sampler.max_batch == 256
    assert origins["rl.sampler.max_batch!"].startswith("36 fit in ")


def test_of_a_model_whose_size_is_not_known_half_of_the_share_is_left_for_weights():
    stage = sampler_on("1x24GB", None, sglang=False, over_sampling=64, max_new_tokens=1024)
    share = 0.4 * machine_of("1x24GB").gpu.memory
    assert (stage.sampler.max_batch, stage.sampler.context) == (256, 2048)
    assert stage.sampler.cache_bytes == pytest.approx(share / 2, abs=2)


def test_the_context_is_within_the_models_positions_and_the_trainers_micro_batch():
    assert sampler_on("cpu:2:avx2:8GiB", NARROW_HEADS, max_new_tokens=16).sampler.context == 512
    assert sampler_on("1xH100", micro_batch_tokens=1000).sampler.context == 1000
    assert sampler_on("1xH100", max_new_tokens=1000).sampler.context == 2048  # in whole slots


def test_the_cpus_replicas_share_a_quarter_of_the_memory():
    sampler = sampler_on("cpu:2:avx2:32GiB", DEPTH_12, prompts_per_step=1000).sampler
    assert 7.9 * GIB < 2 * (sampler.cache_bytes + 2 * 4 * DEPTH_12.total) <= 8 * GIB


def evaluation_on(text, model=DEPTH_24, origins=None, **settings):
    machine = machine_of(text)
    resources = {"num_ranks": 1, "threads": machine.cores, "device": machine.device}
    table = {"benchmarks": ({"name": "gsm8k"},), "resources": resources, "precision": "bf16", **settings}
    return derive_evaluation("e", EvalStage(kind="eval", **table), machine, model, {} if origins is None else origins)


@pytest.mark.parametrize(("text", "engine", "replicas", "max_batch"), [
    ("8xH100+sglang", "sglang", 8, 256), ("8xH100", "embedded", 8, 256), ("1x24GB", "embedded", 1, 256),
    ("2xT4+sglang", "embedded", 2, 256), ("2x8xH100", "embedded", 8, 256), ("cpu:2:avx2:8GiB", "embedded", 2, 64),
])  # fmt: skip
def test_an_evaluation_has_rls_engine_and_a_sampler_for_each_gpu(text, engine, replicas, max_batch):
    options = {} if engine == "sglang" else {"schedule_policy": "fcfs"}
    sampler = evaluation_on(text, sampler={"options": options}).sampler
    assert (sampler.engine, sampler.replicas, sampler.max_batch, sampler.options) == (engine, replicas, max_batch, {})


def test_an_evaluations_sglang_server_over_two_gpus_has_twice_the_cache_but_for_the_weights():
    one, two = (evaluation_on("8xH100+sglang", sampler={"tensor_parallel": each}).sampler for each in (1, 2))
    assert (one.replicas, two.replicas) == (8, 4)
    assert two.cache_bytes == pytest.approx(2 * one.cache_bytes + 2 * DEPTH_24.total, abs=4)
    assert evaluation_on("cpu:8:avx2:32GiB", sampler={"engine": "sglang"}).sampler.replicas == 1


@pytest.mark.parametrize(("model", "expected"), [(DEPTH_24, 111), (DEPTH_12, 256), (QWEN, 256)])
def test_an_evaluation_on_24_gb_has_room_for_gsm8ks_prompts_and_answers(model, expected):
    """The context is by need: 400 tokens of a prompt and 512 of an answer; with 2 GiB in fp32 it was 512 in all."""
    sampler = evaluation_on("1x24GB", model).sampler
    slots, context = plan_cache(_architecture(model), sampler.max_batch, 912, sampler.cache_bytes, 2)
    assert (slots, context) == (expected, 912)
    assert slots * 960 * model.token_bytes(2) + 2 * model.total <= 0.7 * machine_of("1x24GB").gpu.memory


def _architecture(model):
    return qwen3_architecture(model.shape, vocabulary=32768, rope_theta=1e4, max_positions=model.max_positions)


def test_a_benchmark_has_the_stage_s_seed_and_limit_of_an_answer_where_it_says_none():
    own = {"name": "own", "form": "gsm8k", "seed": 5, "max_new_tokens": 9, "temperature": 1.0}
    origins = {}
    more = {"seed": 3, "max_new_tokens": 40, "benchmarks": ({"name": "gsm8k"}, own)}
    derived = evaluation_on("cpu:1:avx2:8GiB", origins=origins, **more)
    first, second = derived.benchmarks
    assert (derived.micro_batch_tokens, origins["e.micro_batch_tokens"]) == (1024, "derived: on cpu")
    assert (first.seed, first.max_new_tokens, second.seed, second.max_new_tokens) == (3, 40, 5, 9)
    assert origins["e.benchmarks.0.seed"] == "derived: the stage's seed" and "e.benchmarks.1.seed" not in origins
