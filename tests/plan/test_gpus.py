"""Plans of GPUs: sums by bytes and FLOPs against what others have measured, and what follows for layouts. No GPU has
confirmed any of them."""

import gzip
import json
import re
from dataclasses import replace
from functools import cache

import pytest

from nanodag.cli.plan import show_plan
from nanodag.config import resolve
from nanodag.config.footprint import lora_parameters
from nanodag.config.model_size import KNOWN
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from nanodag.plan.evaluation import scoring_gpus
from nanodag.plan.make import plan_of
from nanodag.plan.sizes import Sizes
from nanodag.plan.speeds import Asked, PlannedDevices, overlapped_s, weights_s
from nanodag.run.stale_stages import config_digest, made_stages
from nanodag.worker.devices import Devices, devices_folder, hold
from tests.run_records import built, run_record
from tests.store.making import key, publish

FILE = PROJECT / "pipeline.yaml"
EIGHT = "8xH100+sglang"
LARGE = "base.model=hub:Qwen/Qwen3-8B"
SEVEN = "base.model=hub:Qwen/Qwen2.5-7B"


@cache
def resolved(preset, machine, *overrides):
    return resolve(FILE, preset, overrides, machine=machine_of(machine)).pipeline


def stage_of(preset, machine, stage, *overrides):
    return plan_of(resolved(preset, machine, *overrides), machine_of(machine), stages=[stage]).stages[0]


def rl(machine, *overrides):
    given = (each if each.startswith("base.") else f"rl.{each}" for each in overrides)
    return stage_of("gsm8k-rl", machine, "rl", *given)


def test_nanochats_d24_of_january_2026_is_planned_within_a_quarter_of_what_it_took():
    """karpathy/nanochat dev/LEADERBOARD.md at 00932d1, run 1 (commit 348fbb3): --depth=24, ratio 12, bf16, 16,704
    steps of 2^19 tokens, 4.33e19 FLOPs, 10,949 s of steps alone on 8xH100."""
    given = ("tokens_per_parameter=12", "batch_tokens=524288", "validation_every=1000000", "validation_tokens=1048576")
    plan = stage_of("speedrun", "8xH100", "pretrain", *(f"pretrain.{each}" for each in given))
    assert plan.steps == 16_704
    assert plan.flops == pytest.approx(4.3308e19, rel=0.03)
    assert plan.seconds == pytest.approx(10_949, rel=0.25)


@pytest.mark.parametrize(
    ("samples", "longest", "at_once", "lag", "steps"),
    [(8, 10, 8, 0, 10), (1, 10, 8, 0, 10), (16, 10, 8, 0, 14), (12, 4, 8, 0, 6), (16, 10, 8, 1, 8), (4, 10, 8, 1, 2)],
)
def test_samples_are_done_when_the_longest_is_unless_others_take_their_places(samples, longest, at_once, lag, steps):
    asked = Asked(times=5, samples=3 * samples, answer=4.0, longest=longest, lag=lag)
    assert asked.steps(count=3, at_once=at_once) == 5 * steps


@pytest.mark.parametrize(
    ("name", "weights", "cache"), [("Qwen/Qwen2.5-0.5B", 0.99e9, 12_288), ("Qwen/Qwen2.5-7B", 15.2e9, 57_344)]
)
def test_a_decode_step_reads_the_weights_once_and_each_samples_cache(name, weights, cache):
    model, share = KNOWN[name], 0.5
    gpu = PlannedDevices(machine=machine_of("1xH100"), device="cuda", precision="bf16", count=1, engine="sglang")
    asked = [Asked(times=1, samples=64, answer=1, longest=1)]
    seconds = gpu.decoding_s(model, asked, context=1024, at_once=64)
    read = weights + 64 * 1024 * cache
    assert seconds == pytest.approx((read / 3350e9 + 64 * model.forward_flops(1024) / 989e12) / share, rel=0.01)
    split = PlannedDevices(**vars(gpu) | {"gpus_each": 2})
    assert split.decoding_s(model, asked, context=1024, at_once=64) == pytest.approx(seconds / 2)


def test_new_weights_take_their_bytes_over_the_ways_speed_and_a_call_for_each_bucket_and_sampler():
    assert weights_s(0.7e9, "disk", bucket_bytes=1, samplers=10) == pytest.approx(1 + 10 * 0.18e-3)
    assert weights_s(20e9, "nccl", bucket_bytes=1_000_000_000, samplers=8) == pytest.approx(1 + 20 * 8 * 0.18e-3)


def test_work_at_the_same_time_takes_the_longer_and_one_step_of_the_shorter():
    assert overlapped_s(8.0, 12.0, 4) == overlapped_s(12.0, 8.0, 4) == 14.0


NCCL = ("weights.sync=distributed", "weights.sync_backend=nccl")
APART = ("placement=separate", *NCCL)


def test_rl_takes_the_longest_answer_of_each_step_in_the_order_of_prompts_and_the_mean_where_samples_go_on():
    """Half of the answers' limit is their mean, so that steps that wait for the longest take twice the passes."""
    flight = ("over_sampling=0", "weights.sync_mode=in_place", "max_staleness=1", "num_steps=100", "eval_prompts=0")
    waits, goes_on = (rl(EIGHT, LARGE, *APART, *flight, f"rollout.order={order}") for order in ("prompt", "arrival"))
    assert waits.tokens == goes_on.tokens and 1.3 < waits.seconds / goes_on.seconds < 2


def test_staleness_on_gpus_apart_saves_the_shorter_of_sampling_and_training_and_on_shared_ones_nothing():
    few = ("num_steps=1000", "eval_prompts=0", "optimizer.activation_checkpointing=true")
    fresh, stale = (rl(EIGHT, LARGE, *APART, *few, f"max_staleness={each}") for each in (0, 1))
    passes = 1 + 1 / 3 + 1 / 3  # forward and backward, a reference, and the forward pass again
    training = passes * fresh.tokens * KNOWN["Qwen/Qwen3-8B"].training_flops(575) / (0.25 * 4 * 989e12)
    assert fresh.seconds - stale.seconds == pytest.approx(training * (1 - 1 / 1000), rel=0.01)
    assert stale.seconds < 0.8 * fresh.seconds
    beside = [rl(EIGHT, LARGE, "placement=beside", *few, f"max_staleness={each}").seconds for each in (0, 1)]
    assert beside[0] == pytest.approx(beside[1])


def test_a_step_takes_what_its_models_bytes_take_on_their_way():
    for model, size in ((LARGE, 16.38e9), ("base.model=hub:Qwen/Qwen2.5-0.5B", 0.988e9)):
        given = (EIGHT, model, "placement=separate", "num_steps=100")
        disk, nccl = (rl(*given, *way).seconds / 100 for way in (("weights.sync=disk",), NCCL))
        calls = 4 * (-(-size // (64 << 20)) - 1) * 0.18e-3
        assert disk - nccl == pytest.approx(size / 0.7e9 - size / 20e9 - calls, rel=0.01)


def test_a_sync_of_adapters_takes_what_their_bytes_take_on_their_way():
    given = (EIGHT, "base.model=hub:Qwen/Qwen2.5-0.5B", "placement=separate", "num_steps=100", "lora_rank=16")
    ways = (f"weights.lora_sync={way}" for way in ("merged", "adapter"))
    merged, alone = (rl(*given, "sampler.engine=embedded", "weights.sync=disk", way).seconds / 100 for way in ways)
    adapters = 2 * 24 * 16 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))  # of each matrix (in + out) * rank
    assert merged - alone == pytest.approx((0.988e9 - adapters) / 0.7e9, rel=0.01)


def test_states_that_are_lent_go_to_the_host_and_back_each_step_and_offloaded_ones_are_updated_there():
    few = ("num_steps=1000", "optimizer.activation_checkpointing=true", "sampler.memory_fraction=0.4")
    lent, kept, offloaded = (
        rl(EIGHT, LARGE, *few, "placement=shared", f"lends_states={lends}", f"resources.offload_optimizer={offload}")
        for lends, offload in (("true", "none"), ("false", "none"), ("false", "cpu"))
    )
    (states,) = (process.host["lent"] for process in lent.processes if process.name == "trainer")
    assert lent.seconds - kept.seconds == pytest.approx(1000 * 2 * states / 25e9)
    updated = 1000 * KNOWN["Qwen/Qwen3-8B"].total / 8 * 1.6e-9
    assert offloaded.seconds - kept.seconds == pytest.approx(updated)


def test_an_evaluation_that_only_writes_holds_one_model_and_one_that_scores_holds_another():
    """A model of 7 B in bf16 has 15.2 GB: once it fits into 24 GB, twice it does not."""
    written = stage_of("gsm8k-rl", "1x24GB+sglang", "eval_base", SEVEN)
    assert not written.faults and 15.2e9 < written.device_bytes < 24e9 and written.at_once > 8
    assert not stage_of("gsm8k-rl", "1x24GB", "eval_base", SEVEN).faults
    scored = "eval_base.benchmarks=[{name: gsm8k, source: 'hub:openai/gsm8k/main:test'}, {name: arc_easy, "
    scored += "source: 'hub:allenai/ai2_arc/ARC-Easy:validation'}]"
    both = stage_of("gsm8k-rl", "1x24GB+sglang", "eval_base", SEVEN, scored)
    (fault,) = both.faults
    assert not fault.mend and "nothing that was tried" in fault.why and both.device_bytes > 30.4e9


def test_likelihoods_are_scored_on_all_gpus():
    scored = "eval_base.benchmarks=[{name: mmlu, source: 'hub:cais/mmlu/all:test', limit: 10000}]"
    plans = [stage_of("gsm8k-rl", f"{count}xH100", "eval_base", LARGE, scored) for count in (1, 2, 4)]
    one, two, four = (plan.seconds for plan in plans)
    assert one - two == pytest.approx(2 * (two - four)) and one - two > 1
    assert [plan.num_gpus for plan in plans] == [1, 2, 4]
    assert len({plan.device_bytes for plan in plans}) == 1
    assert scoring_gpus(resolved("gsm8k-rl", EIGHT, LARGE).stages["eval_base"]) == 0


def test_a_checkpoint_of_adapters_has_their_weights_and_moments_alone():
    whole, adapters = (rl("8xH100", *more) for more in ((), ("lora_rank=16",)))
    model = KNOWN["Qwen/Qwen2.5-0.5B"]
    saved = 12 * (model.total - lora_parameters(model.shape, 16))
    keeps = resolved("gsm8k-rl", "8xH100").stages["rl"].keep_checkpoints
    assert whole.disk_bytes - adapters.disk_bytes == (keeps + 1) * saved


def test_a_stage_that_leaves_its_adapters_keeps_their_bytes_and_not_the_models():
    merged, alone = (rl("8xH100", "lora_rank=16", f"lora_save={way}").kept_bytes for way in ("merged", "adapter"))
    model = KNOWN["Qwen/Qwen2.5-0.5B"]
    assert merged - alone == 2 * (model.total - lora_parameters(model.shape, 16))


def test_rows_and_text_of_json_lines_and_of_compressed_text_are_measured(tmp_path):
    rows = [json.dumps({"question": "q" * 40, "answer": "a" * 10, "n": 5}) for _ in range(30_000)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress("\n".join(rows[:300]).encode()))
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(b"word " * 5000))
    (tmp_path / "damaged.jsonl").write_text("{no json")
    found = [Sizes().of(f"file:{tmp_path / name}") for name in ("rows.jsonl", "packed.jsonl.gz", "damaged.jsonl")]
    assert found[0].rows == pytest.approx(30_000, rel=0.001) and found[0].row_bytes == 50
    assert (found[1].rows, found[1].row_bytes, found[2]) == (300, 50, None)
    assert Sizes().text_bytes(f"file:{tmp_path}/packed.txt.gz") == pytest.approx(25_000, abs=1)


def test_a_stage_reads_no_more_than_its_files_have_and_says_how_often(tmp_path, capsys):
    (tmp_path / "own.txt").write_text("some words \n" * 50_000)
    given = [f"{stage}.data=['file:{tmp_path}/*.txt']" for stage in ("tokenizer", "pretrain")]
    lost, options = [f"pretrain.data=['file:{tmp_path}/*.jsonl']"], {"file": str(FILE), "price_per_hour": 0}

    def said(overrides, preset, on):
        code = show_plan(overrides, preset=preset, on=on, as_json=True, **options)
        return code, json.loads(capsys.readouterr().out)

    tokenizer, pretrain = said(given, "speedrun", "8xH100")[1]["stages"][:2]
    assert tokenizer["read_bytes"] == pretrain["read_bytes"] == 600_000
    assert any("its data of 600.0 kB are passed" in note for note in pretrain["notes"])
    code, plan = said(lost, "pocket", "")
    assert code == 2 and f"pretrain.data.0: Source 'file:{tmp_path}/*.jsonl' matches no file" in plan["faults"][0]
    assert said(lost, "speedrun", "8xH100")[0] == 0, "another machine has files of its own"


def test_a_plan_says_who_holds_the_machine_now(store, monkeypatch, capsys):
    monkeypatch.setattr("nanodag.cli.plan.faults_of_names", lambda *_, **__: [])
    with hold(devices_folder(store), Devices(name="cpu", capacity=1), holder="sft of run a"):
        show_plan([f"store.url={store.url}"], preset="pocket", file=str(FILE), on="", price_per_hour=0, as_json=True)
    assert any("held now by sft of run a" in text for text in json.loads(capsys.readouterr().out)["warnings"])


@pytest.mark.parametrize(("name", "text"), [("empty.jsonl", ""), ("numbers.jsonl", '{"x": 1}\n'), ("empty.txt", "")])
def test_a_file_without_text_is_planned_without_a_traceback(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    data = [f"{stage}.data=['file:{tmp_path / name}']" for stage in ("tokenizer", "pretrain")]
    options = {"preset": "pocket", "file": str(FILE), "on": "cpu:2:avx2:64GiB", "price_per_hour": 0, "as_json": True}
    assert show_plan(data, **options) in (0, 2)


def test_a_gpu_that_nobody_knows_is_planned_without_time_and_told_how_it_gets_one(capsys):
    unknown = "1xGB10@119.5GiB@12.1:20:other:119.5GiB"
    assert show_plan([], preset="gsm8k-rl", file=str(FILE), on=unknown, price_per_hour=0, as_json=False) == 0
    assert "--on 1x120GB:TFLOPS says it" in " ".join(capsys.readouterr().out.split())
    plan = rl(unknown)
    assert plan.seconds is None and plan.device_bytes > 1e9 and not plan.faults
    assert 0 < rl("1x120GB:500").seconds < rl("1x120GB:50").seconds


def test_the_time_of_rl_in_each_layout_is_said_the_fastest_first(capsys):
    few = ["rl.num_steps=100"]
    show_plan(few, preset="gsm8k-rl", file=str(FILE), on=EIGHT, price_per_hour=0, as_json=True)
    times = json.loads(capsys.readouterr().out)["layouts"]["rl"]
    assert len(times) == 3 and min(times.values()) > 0
    show_plan(few, preset="gsm8k-rl", file=str(FILE), on=EIGHT, price_per_hour=0, as_json=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "with placement=" in line]
    assert re.findall(r"with ([\w= ]+)", line) == sorted(times, key=lambda layout: times[layout])
    show_plan(few, preset="gsm8k-rl", file=str(FILE), on="1xH100+sglang", price_per_hour=0, as_json=True)
    assert json.loads(capsys.readouterr().out)["layouts"] == {}


def test_stages_of_the_same_config_and_inputs_are_made_already_and_take_no_time(store, product):
    pipeline = resolved("pocket", "cpu:2:avx2:8GiB")
    first = publish(store, product, key("a"), kind="tokenizer", stage="tokenizer")
    digests = {name: config_digest(pipeline.stages[name]) for name in ("tokenizer", "pretrain", "midtrain")}

    def entry(name, letter, inputs, **fields):
        made = {"attempt": first.attempt, "digest": f"{name}'s", "config": digests[name], "inputs": inputs}
        return built(first, key=key(letter)).changed(made=made, **fields)

    stages = {
        "tokenizer": entry("tokenizer", "a", {}),
        "pretrain": entry("pretrain", "a", {"tokenizer": "tokenizer's"}),
        "midtrain": entry("midtrain", "b", {"model": "pretrain's"}),  # which the store has lost
    }
    store.write_run(run_record("first", stages=stages))
    store.write_run(run_record("second", stages={"tokenizer": stages["tokenizer"]}))
    assert made_stages(pipeline, store) == {"tokenizer": "second", "pretrain": "first"}
    plan = replace(plan_of(pipeline, machine_of("cpu:2:avx2:8GiB")), made=made_stages(pipeline, store))
    left = [stage for stage in plan.stages if stage.name not in ("tokenizer", "pretrain") and not stage.is_beside]
    assert plan.seconds == pytest.approx(sum(stage.seconds for stage in left)) and len(left) > 3
    other = resolved("pocket", "cpu:2:avx2:8GiB", "tokenizer.vocabulary=1024")
    assert made_stages(other, store) == {}
