"""Plans: sums worked out by hand, each fault with the change that mends it, and machines that each preset fits."""

import json
from dataclasses import replace
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from nanodag.cli.plan import show_plan
from nanodag.config import resolve
from nanodag.config.dial import shape_of
from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.config.kinds.small_stages import TokenizerStage
from nanodag.config.model_size import ModelSize
from nanodag.config.model_size import model_of as derived_model
from nanodag.config.rl_parts import GenerateConfig
from nanodag.data.config import SourceConfig
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from nanodag.plan import host_memory, sizes
from nanodag.plan.case import Case
from nanodag.plan.make import check_plan, plan_of
from nanodag.plan.sizes import CORE_CONTEXT, Sizes, core_items, core_tokens
from nanodag.plan.small_stages import plan_tokenizer
from nanodag.plan.speeds import CPU_SHARES, Asked, PlannedDevices

FILE = PROJECT / "pipeline.yaml"
CPU, GPU, EIGHT = "cpu:2:avx2:8GiB", "1x24GB", "8xH100"
OF_POCKET = ("pretrain.horizon_tokens=2457600", "pretrain.batch_tokens=8192", "pretrain.sequence_length=256")


@cache
def resolved(preset, machine, *overrides):
    return resolve(FILE, preset, overrides, machine=machine_of(machine)).pipeline


@cache
def planned(preset, machine, *overrides, **limits):
    """limits: of the machine, its memory or disk."""
    return plan_of(resolved(preset, machine, *overrides), replace(machine_of(machine), **limits))


def changed(pipeline, name, **fields):
    stages = {**pipeline.stages, name: pipeline.stages[name].model_copy(update=fields)}
    return stage_of(plan_of(pipeline.model_copy(update={"stages": stages}), machine_of(CPU)), name)


def stage_of(plan, name):
    return next(stage for stage in plan.stages if stage.name == name)


def test_pretraining_of_pocket_in_numbers():
    stage = stage_of(planned("pocket", CPU, *OF_POCKET), "pretrain")
    matrices = 3 * (4 * 192 * 192 + 3 * 192 * 512)
    assert stage.parameters == matrices + 2048 * 192 + 3 * (2 * 192 + 2 * 32) + 192
    assert (stage.tokens, stage.steps) == (2457600, 300)
    assert stage.flops == 2457600 * (6 * (matrices + 2048 * 192) + 6 * 3 * 192 * 256)
    assert stage.device_bytes == 0 and 0.5e9 < stage.host_bytes < 4e9


def test_benchmarks_that_a_policy_is_asked_take_their_answers_at_each_interval_at_the_start_and_at_the_end():
    def sampled(*overrides):
        return stage_of(planned("gsm8k-rl", GPU, "rl.num_steps=45", *overrides), "rl").seconds

    none, asked = "rl.evaluation.benchmarks=[]", "{name: gsm8k, source: 'hub:openai/gsm8k/main:test', limit: 100"
    once, each = (f"rl.evaluation.benchmarks=[{asked}, every: {every}}}]" for every in (1000, 10))
    start, ten = sampled(once) - sampled(none), sampled(each) - sampled(none)
    assert ten / start == pytest.approx(6 / 2)  # 0, 10, 20, 30, 40, 45 and 0, 45
    assert sampled(once, "rl.eval_at_start=false") < sampled(once)


def test_core_takes_its_tokens_every_core_every_steps_at_the_end_and_in_an_evaluation():
    plans = [planned("speedrun", EIGHT, "core_bundle=none"), planned("speedrun", EIGHT, "pretrain.core_limit=500")]
    without, scored = (stage_of(plan, "eval_base").tokens for plan in plans)
    assert scored - without == pytest.approx(core_tokens(0, 32768), rel=1e-6)
    assert core_items(1) == 22 and core_items(0) > core_items(500) > core_items(100)
    without, scored = (stage_of(plan, "pretrain") for plan in plans)
    model = derived_model(resolved("speedrun", EIGHT), "pretrain")
    times = (scored.steps - 1) // 500 + 1
    flops = times * core_tokens(500, 32768) * model.forward_flops(CORE_CONTEXT)
    assert scored.seconds - without.seconds == pytest.approx(flops / (0.20 * 8 * 989e12))
    assert scored.seconds < 1.03 * without.seconds  # what the preset may spend on it
    (said,) = [note for note in scored.notes if note.startswith("CORE")]
    assert said == f"CORE every 500 steps and at the end, {core_items(500):,} items each time"


def test_benchmarks_that_a_supervised_stage_asks_take_an_evaluations_seconds_each_time_and_a_model_on_disk():
    def trained(*overrides):
        return stage_of(planned("speedrun", GPU, "pretrain.max_steps=45", *overrides), "pretrain")

    asked = "pretrain.benchmarks=[{name: gsm8k, source: 'hub:openai/gsm8k/main:test', limit: 100}]"
    without, once, often = (trained(*more) for more in ((), (asked,), (asked, "pretrain.benchmarks_every=10")))
    ratio = (often.seconds - without.seconds) / (once.seconds - without.seconds)
    assert ratio == pytest.approx(5)  # 10, 20, 30, 40, 45 and 45
    assert often.notes[0] == "asks gsm8k every 10 steps and at the end"
    assert often.disk_bytes - without.disk_bytes == 2 * without.parameters  # its folder, in bf16


def test_price_is_that_of_the_machine_for_so_long():
    plan = plan_of(resolved("speedrun", EIGHT), machine_of(EIGHT), price_per_hour=24.0)
    assert plan.price_of(3600.0) == 24.0
    assert plan.as_json()["price"] == pytest.approx(24 * plan.seconds / 3600)


LARGE = ("pretrain.batch_tokens=65536",)
FAULTS = [
    (GPU, "single-gpu", ("pretrain.micro_batch_tokens=524288",), "pretrain.micro_batch_tokens"),
    ("1x12GB", "single-gpu", ("pretrain.micro_batch_tokens=262144",), "pretrain.micro_batch_tokens"),
    (GPU, "gsm8k-rl", ("rl.optimizer.micro_batch_tokens=131072",), "rl.optimizer.micro_batch_tokens"),
    (GPU, "gsm8k-rl", ("rl.sampler.max_batch=256", "rl.sampler.cache_bytes=100000000"), "rl.sampler.max_batch"),
    (GPU, "gsm8k-rl", ("rl.sampler.context=1040",), "rl.sampler.context"),
    (CPU, "small", ("eval_sft.max_new_tokens=1000",), "eval_sft.max_new_tokens"),
    (CPU, "small", ("eval_sft.sampler.cache_bytes=1000",), "eval_sft.sampler.cache_bytes"),
    ("cpu:2:avx2:3.5GiB", "pocket", (*LARGE, "pretrain.micro_batch_tokens=32768"), "pretrain.micro_batch_tokens"),
    (GPU, "gsm8k-rl", ("rl.sampler.cache_bytes=22000000000", "rl.sampler.max_batch=1400"), "rl.optimizer.micro"),
    (CPU, "small", ("eval_sft.sampler.max_batch=4000", "eval_sft.sampler.cache_bytes=20000000000"), "eval_sft.sampler"),
    ("cpu:2:avx2:1GiB", "small", ("tokenizer.max_bytes=2000000000",), "tokenizer.max_bytes"),
]


@pytest.mark.parametrize("machine, preset, overrides, named", FAULTS)
def test_a_fault_names_the_setting_and_a_change_that_mends_it(machine, preset, overrides, named):
    fault = next(fault for fault in planned(preset, machine, *overrides).faults if fault.startswith(named))
    mends = fault.rpartition("; set ")[2].split()
    assert mends and all("=" in mend for mend in mends)
    rest = [text for text in overrides if text.partition("=")[0] not in {m.partition("=")[0] for m in mends}]
    after = planned(preset, machine, *rest, *mends).faults
    assert not [fault for fault in after if fault.startswith(named)]


@pytest.mark.parametrize(
    ("limits", "stage", "mend"),
    [({"disk": 60_000_000}, "midtrain", "keep_checkpoints=1"), ({"memory": 400_000_000}, "report", "contamination=[]")],
)
def test_a_disk_or_memory_that_one_stage_fills_is_a_fault_of_that_stage(limits, stage, mend):
    (fault,) = stage_of(planned("pocket", CPU, **limits), stage).faults
    assert fault.mend == (mend,)
    assert not stage_of(planned("pocket", CPU, f"{stage}.{mend}", **limits), stage).faults


@pytest.mark.parametrize(
    ("preset", "machine", "stage", "overrides", "fault"),
    [
        ("speedrun", EIGHT, "pretrain", ["pretrain.num_ranks=16"], "16 GPUs are wanted, and a node has 8"),
        ("gsm8k-rl", "1x3GB", "rl", [], "nothing that was tried"),
        ("pocket", CPU, "pretrain", ["pretrain.resources.device=cuda", "pretrain.num_ranks=1"], "machine has no GPU"),
    ],
)  # fmt: skip
def test_what_no_smaller_batch_mends_is_one_fault_and_in_a_work_pool_none(preset, machine, stage, overrides, fault):
    (found,) = stage_of(planned(preset, machine, *overrides), stage).faults
    assert fault in found.text(stage)
    pool = (f"{stage}.work_pool=gpus", f"{stage}.device=cuda", "server.database=postgresql+asyncpg://u@h/d")
    elsewhere = stage_of(planned(preset, machine, *overrides, *pool), stage)
    assert not elsewhere.faults and "work pool" in elsewhere.notes[-1]


def test_a_disk_without_room_for_one_checkpoint_says_how_much_is_needed():
    (fault,) = planned("pocket", CPU, disk=200_000).faults
    assert fault.startswith("store.url: ") and "at tokenizer" in fault
    assert "set store.url to a place with 409.6 kB" in fault


def test_what_does_not_fit_is_refused_with_every_line_where_it_is_to_be_run_and_not_meant():
    check_plan(resolved("speedrun", CPU), machine_of(CPU), stages=["tokenizer"])
    check_plan(resolved("single-gpu", GPU, FAULTS[0][2][0], f"unchecked=[{FAULTS[0][3]}]"), machine_of(GPU))
    with pytest.raises(ConfigError, match="does not fit") as caught:
        check_plan(resolved("speedrun", CPU), machine_of(CPU))
    assert "pretrain.micro_batch_tokens" in str(caught.value)


def test_servers_of_others_take_nothing_of_this_machine_and_nobody_knows_how_long_they_take():
    pipeline = resolved("pocket", CPU)
    sampler = pipeline.stages["rl"].sampler.model_copy(update={"urls": ("http://node2:1",), "replicas": 0})
    plan = changed(pipeline, "rl", sampler=sampler)
    assert [process.count for process in plan.processes if process.name == "sampler"] == [0] and plan.seconds is None
    assert any("servers of others" in note for note in plan.notes)
    assert changed(pipeline, "rl").seconds > 0


def test_rollouts_of_files_take_the_disk_that_sampled_ones_take_and_no_time_to_sample():
    sampled, of_files = (
        stage_of(planned("pocket", CPU, *more), "rl")
        for more in (("rl.filters=[]",), ("rl.filters=[]", "rl.source=file:/x.jsonl", "rl.eval_prompts=0"))
    )
    assert of_files.kept_bytes == sampled.kept_bytes and 0 < of_files.seconds < sampled.seconds
    assert "sampler" not in {process.name for process in of_files.processes}


@pytest.mark.parametrize(
    ("generate", "counts"),
    [
        ({"name": "environment:nanodag.rl.environments.examples.rooms:Rooms"}, {"environment": 1, "episode": 128}),
        ({"name": "openenv:http://127.0.0.1:9", "options": {"at_once": 5}}, {"environment": 1, "episode": 5}),
        ({"name": "agent:json:loads"}, {"agent": 1, "episode": 16}),
        ({"name": "json:loads"}, {"function": 1, "episode": 128}),
        ({"name": "agent", "options": {"command": ("python",), "at_once": 3}}, {"agent": 3}),
        ({"name": "verifiers:boxes"}, {"verifiers": 1, "verifiers' tools": 1}),
        ({"name": "calculator"}, {}),
    ],
)
def test_what_answers_the_policy_is_counted_as_often_as_it_runs_at_once(generate, counts):
    pipeline = resolved("pocket", CPU, "rl.sampler.max_batch=64", "rl.prompts_per_step=64", "rl.samples_per_prompt=8")
    rollout = pipeline.stages["rl"].rollout.model_copy(update={"generate": GenerateConfig(**generate)})
    plain, plan = changed(pipeline, "rl"), changed(pipeline, "rl", rollout=rollout)
    more = plan.processes[len(plain.processes) :]
    assert {process.name: process.count for process in more} == counts
    assert plan.host_bytes - plain.host_bytes == sum(process.count * process.on_host for process in more)
    assert len(plan.notes) == 1 + bool(counts)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_evaluation_in_an_environment_counts_a_rollout_for_each_place_of_its_samplers(replicas):
    pipeline = resolved("pocket", CPU)
    benchmark = BenchmarkConfig(name="b", form="verifiers", source="verifiers:boxes[0:9000]", max_new_tokens=16)
    sampler = pipeline.stages["eval_sft"].sampler.model_copy(update={"replicas": replicas, "max_batch": 32})
    plan = changed(pipeline, "eval_sft", benchmarks=(benchmark,), sampler=sampler)
    (held,) = (process.host for process in plan.processes if process.name == "verifiers")
    assert held["rollouts"] == int(replicas * 32 * host_memory.BYTES["verifiers_rollout"])


def test_a_stage_of_few_samples_counts_no_more_episodes_than_these():
    rooms = "rl.generate={name: 'environment:nanodag.rl.environments.examples.rooms:Rooms'}"
    few = ("rl.prompts_per_step=2", "rl.samples_per_prompt=4", "rl.order=prompt", "rl.eval_prompts=5")
    plan = stage_of(planned("pocket", CPU, rooms, "rl.reward=reported", *few), "rl")
    assert [process.count for process in plan.processes if process.name == "episode"] == [8]


def test_files_that_are_shuffled_by_blocks_take_a_window_of_memory_and_others_none(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "WINDOW_BYTES", 4000)
    table = pa.table({"text": [f"{number:08}" for number in range(100)]})
    pq.write_table(table, tmp_path / "small.parquet")
    pq.write_table(pa.concat_tables([table] * 50).combine_chunks(), tmp_path / "large.parquet", use_dictionary=False)
    texts = {"a.jsonl": "{}\n" * 100, "b.txt": "x\n" * 9000, "c.json": "[]" * 9000, "d.jsonl.gz": "x"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    names = ("small.parquet", "large.parquet", "a.jsonl", "b.txt", "c.json", "d.jsonl.gz")
    small, *others = (Sizes().in_windows([SourceConfig(url=f"file:{tmp_path / name}")]) for name in names)
    assert 800 < small < 4000 and others == [4000, 300, 4000, 0, 0]
    found = Sizes().of(f"file:{tmp_path}/large.parquet")
    assert found is not None and found.rows == 5000


def test_json_has_every_stage_with_what_each_process_holds_and_a_plan_with_faults_ends_with_code_2(capsys):
    code = show_plan([], preset="gsm8k-rl", file=str(FILE), on="1xH200", price_per_hour=0.0, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and [stage["name"] for stage in found["stages"]][:2] == ["base", "eval_base"]
    trainer, sampler = found["stages"][2]["processes"][:2]
    assert trainer["device"]["weights"] > 0 and sampler["device"]["cache"] > 0
    code = show_plan([], preset="speedrun", file=str(FILE), on=CPU, price_per_hour=0.0, as_json=False)
    assert code == 2 and "would refuse it" in capsys.readouterr().out


def test_a_model_that_nobody_knows_is_said_to_be_unknown():
    plan = planned("gsm8k-rl", GPU, "base.model=hub:someone/unheard-of")
    assert stage_of(plan, "rl").notes == ("its model is not known yet",) and plan.seconds is None


def test_a_folders_model_is_read_from_its_config(tmp_path):
    config = {
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        **{"intermediate_size": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 10000.0},
        **{"max_position_embeddings": 2048, "hidden_act": "silu", "attention_bias": False},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    plan = planned("gsm8k-rl", GPU, f"base.model=file:{tmp_path}", "rl.sampler.context=1536")
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 32
    assert stage_of(plan, "rl").parameters == 512 * 64 + 2 * layer + 64


@pytest.mark.parametrize("wrong", [{"model_type": "gpt2"}, {"model_type": "llama", "mlp_bias": True}])
def test_a_model_that_cannot_be_trained_is_refused_by_stage_and_setting(tmp_path, wrong):
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^base\.model=file:.* cannot be taken: (model_type 'gpt2'|mlp_bias) in"):
        planned("gsm8k-rl", GPU, f"base.model=file:{tmp_path}")


def test_rows_of_known_sources():
    known, train = Sizes(resolved("speedrun", EIGHT).plan.data), "hub:openai/gsm8k/main:train"
    rows = {train: 7473, f"{train}[100:300]": 200, "python:nanodag.data.lists:sort?size=600": 600}
    assert {url: known.of(url).rows for url in rows} == rows and known.of("python:someone.elses:rows") is None


def test_torchs_compiler_is_counted_where_our_own_code_does_not_take_the_layers():
    ours = derived_model(resolved("pocket", CPU), "pretrain")
    other = replace(ours, shape=replace(ours.shape, mlp_width=520))
    cases = [(ours, True, "cpu"), (other, True, "cpu"), (other, False, "cpu"), (ours, True, "cuda")]
    found = [host_memory.compiler_bytes(model, compiled=compiled, device=device) for model, compiled, device in cases]
    assert [bool(num_bytes) for num_bytes in found] == [False, True, False, True]


def test_a_gpu_that_decodes_one_sample_is_bound_by_its_bandwidth_and_a_core_by_its_products():
    model = ModelSize(shape_of(3), 2048, 512)
    gpu = PlannedDevices(machine=machine_of("1xH100"), device="cuda", precision="bf16", count=1, engine="sglang")
    free = model.forward_flops(0) / gpu.machine.gpu.peak
    one = [Asked(times=1, samples=1, answer=100, longest=100)]
    seconds = gpu.decoding_s(model, one, context=0, at_once=1)
    assert seconds == pytest.approx(100 * (2 * model.total / 3350e9 + free) / 0.5)
    cores = PlannedDevices(machine=machine_of("cpu:2:avx512_bf16:8GiB"), device="cpu", precision="fp32", count=2)
    seconds = cores.decoding_s(model, one, context=0, at_once=1)
    assert seconds == pytest.approx(100 * model.forward_flops(0) / (CPU_SHARES["fp32"].decoding * 2 * 240e9))


def test_an_evaluation_beside_training_adds_nothing_to_the_runs_time():
    plan = planned("pocket", "cpu:2:avx512_bf16:8GiB")
    alone, beside = stage_of(plan, "eval_rl"), stage_of(plan, "eval_base")
    assert beside.is_beside and not alone.is_beside
    assert plan.seconds == pytest.approx(sum(stage.seconds for stage in plan.stages if not stage.is_beside))


def test_groups_that_a_filter_drops_are_not_trained_as_many_as_a_coin_of_unknown_bias_makes_equal():
    def tokens(*overrides):
        return stage_of(planned("pocket", CPU, "rl.over_sampling=0", *overrides), "rl").tokens

    whole, pairs = "plan.groups_with_spread=1", "rl.samples_per_prompt=2"
    assert tokens(whole) == pytest.approx(2 * tokens("plan.groups_with_spread=0.5"), rel=1e-5)
    assert tokens(pairs) == pytest.approx(tokens(pairs, whole) / 4, rel=1e-5)


def test_text_of_a_mirror_is_what_its_footers_say_and_of_a_set_elsewhere_what_the_pipeline_says(tmp_path):
    folder, stated = tmp_path / "openai/gsm8k/main", resolved("small", CPU).plan.data
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"question": [f"{n:100d}" for n in range(50)]}), folder / "train.parquet")
    (folder / "test.parquet").write_bytes(b"no parquet")
    train, test = "hub:openai/gsm8k/main:train", "hub:openai/gsm8k/main:test"
    assert 5000 <= Sizes(stated, tmp_path).text_bytes(train) < 6000
    assert Sizes(stated).text_bytes(train) == 7473 * 530
    assert Sizes(stated, tmp_path).text_bytes(test) == 1319 * 540, "what reads it says that it is damaged"


def test_a_tokenizer_reads_no_more_text_than_its_files_have(tmp_path):
    (tmp_path / "book.txt").write_text("a" * 300_000)
    data = [{"url": f"file:{tmp_path}/*.txt"}]
    stage = TokenizerStage(kind="tokenizer", data=data, vocabulary=512, max_bytes=1_000_000)
    case = Case(name="tokenizer", stage=stage, machine=machine_of(CPU), known_model=None, sizes=Sizes())
    assert plan_tokenizer(case).read_bytes == 300_000
    (tmp_path / "other.txt").write_text("a" * 900_000)
    assert plan_tokenizer(case).read_bytes == 1_000_000


def test_a_cache_on_a_cpu_takes_what_prompts_fill_and_must_have_room_for_the_rest():
    asked = ("rl.data=[hub:openai/gsm8k/main:train]", "rl.max_new_tokens=128", "rl.prompts_per_step=16")
    rl = stage_of(planned("small", "cpu:2:avx512_bf16:8GiB", *asked), "rl")
    sampler = next(process for process in rl.processes if process.name == "sampler")
    slots, token = 64, 2 * 4 * 256 * 2  # bfloat16, as the weights
    assert sampler.host["cache"] + sampler.reserve == slots * 512 * token
    assert sampler.host["cache"] == slots * 256 * token  # 78 of a prompt and 128 of an answer, up to whole pages
    assert rl.most_host_bytes == rl.host_bytes + 2 * sampler.reserve


MADE_FOR = {
    **dict.fromkeys(("pocket", "best-of-n", "small", "post-train", "preferences"), (CPU, GPU, "1xH200")),
    **{"single-gpu": (GPU, "1xH200"), "speedrun": (EIGHT,), "gsm8k-rl": (GPU, "1xH200", EIGHT)},
}


@pytest.mark.parametrize("preset, machine", [(preset, machine) for preset in MADE_FOR for machine in MADE_FOR[preset]])
def test_a_preset_fits_the_machines_that_it_is_made_for(preset, machine):
    plan = planned(preset, machine)
    assert plan.faults == []
    # How many answers are good enough to train on, nobody knows beforehand.
    assert {stage.name for stage in plan.stages if stage.seconds is None} <= {"sft_best", "dpo", "reward_model"}
    assert all(stage.processes for stage in plan.stages)


def test_a_reward_model_stands_in_the_plan_with_its_memory_and_its_time():
    stages = [
        stage_of(planned("preferences", CPU, *changes), "rl_on_model")
        for changes in ((), ("rl_on_model.rollout.reward_processes=2",))
    ]
    one, two = (next(p for p in stage.processes if p.name == "rewards") for stage in stages)
    assert one.host["reward models"] == 4 * stages[0].parameters and (one.count, two.count) == (1, 2)
    unjudged = stage_of(planned("preferences", CPU), "rl")
    assert next(p for p in unjudged.processes if p.name == "rewards").host == {"process": host_memory.BYTES["rewards"]}
    assert stages[1].seconds < stages[0].seconds


def test_every_preset_is_made_for_a_machine():
    assert set(yaml.safe_load(FILE.read_text())["presets"]) == set(MADE_FOR)


@pytest.mark.parametrize(
    ("model", "machine"),
    [("Qwen/Qwen3-8B", "8xH100"), ("Qwen/Qwen2.5-3B", "1x24GB"), ("Qwen/Qwen2.5-0.5B-Instruct", "1xT4")],
)
def test_what_auto_gives_the_evaluation_of_an_imported_model_fits(model, machine):
    plan = stage_of(planned("gsm8k-rl", machine, f"base.model=hub:{model}"), "eval_base")
    assert not plan.faults and plan.at_once > 64


@pytest.mark.parametrize(("machine", "peak"), [("8xH100", 8 * 989e12), ("8xA100", 0.0)])
def test_products_of_layers_in_fp8_take_half_the_time_where_a_gpu_has_them_and_as_long_elsewhere(machine, peak):
    how = ("pretrain.validation_tokens=0", "pretrain.core_every=0", "pretrain.activation_checkpointing=false")
    bf16, fp8 = (
        stage_of(planned("speedrun", machine, *how, f"pretrain.precision={precision}"), "pretrain")
        for precision in ("bf16", "fp8")
    )
    shape = shape_of(24)
    matrices = 24 * (4 * shape.width * shape.width + 3 * shape.width * shape.mlp_width)
    saved = bf16.tokens * 3 * matrices / (0.4 * peak) if peak else 0.0
    assert bf16.seconds - fp8.seconds == pytest.approx(saved)
    assert (bf16.device_bytes, bf16.flops) == (fp8.device_bytes, fp8.flops)
