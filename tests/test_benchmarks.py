"""What benchmarks read of the library: records of runs, and pipelines that still resolve."""

import shutil
import sys

import pytest
import yaml

from benchmarks import (
    agent_learns,
    gains,
    gpu,
    gpu_checks,
    gpu_parts,
    orchestration,
    pocket,
    retry,
    saved_learns,
    step_judge,
    verifiers_learns,
)
from benchmarks import plan as plan_benchmark
from benchmarks import store as store_benchmark
from nanodag.config import resolve
from nanodag.config.resolve import leaves
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from nanodag.plan.make import plan_of
from nanodag.rl.rollouts.rollout import Rollout, prompt_span, write_rollouts
from nanodag.worker.job import read_job
from tests.run_records import run_record, stage_record

OF_MACHINE = ("resources.", "sampler.replicas", "sampler.max_batch", "sampler.cache_bytes", "precision", "compile")
COST = {"seconds": 2.0, "start_s": 1.0, "work_s": 0.5}


def test_the_store_that_commands_are_timed_on_has_whole_records(store, tmp_path):
    store_benchmark.fill(store, 10, tmp_path / "product")
    record = store.read_run("run-0000")
    assert len(record.stages) == 10 and record.state == "completed" and not store.unreadable_runs()
    assert pocket.artifact_of(store, "run-0000", "s3").stage == "s3"


def test_seconds_are_those_of_stages_that_have_made_something(store):
    stages = {"a": stage_record(made={"cost": COST}, key="0" * 40), "b": stage_record()}
    store.write_run(run_record("r", stages=stages))
    assert pocket.seconds_of(store, "r") == {"a": 2.0}


def test_the_last_step_is_read_from_the_workspace_under_the_key(store):
    store.write_run(run_record("r", stages={retry.STAGE: stage_record()}, flow_run="f"))
    assert retry.last_step(store, "r") == 0
    store.change_run("r", lambda record: record.with_stage(retry.STAGE, key="1" * 40))
    path = store.local / "work" / ("1" * 40) / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"event": "step", "step": 7}\n{"event": "step", "st')
    assert retry.last_step(store, "r") == 7


def test_what_follows_a_spoilt_line_is_wrong_and_a_judge_finds_the_line_or_not():
    question = "Sort in steps: 52 17 98"
    right, wrong = ["52", "17 52", "17 52 98"], ["52", "52 17", "52 17 98"]
    assert step_judge.steps_of(question) == right and step_judge.labels_of(question, wrong) == [True, False, False]
    chances = [[0.9, 0.9, 0.9], [0.9, 0.2, 0.9], [0.2, 0.1, 0.1]]
    found = step_judge.found([(question, right), (question, wrong), (question, wrong)], chances)
    assert found == {"steps": 77.8, "first_error": 50.0, "no_error": 100.0, "answers_with_error": 2}


def test_orchestration_is_what_a_task_took_beside_its_worker(capsys):
    stages = {"a": stage_record(made={"cost": COST, "took_s": 2.0}, key="0" * 40)}
    record = run_record("r", stages=stages, started=1.0, ended=4.0)
    orchestration.report(record, record)
    assert "orchestration a stage 1500 ms; a found stage 3000 ms" in capsys.readouterr().out


def test_pipelines_of_benchmarks_resolve(tmp_path):
    (tmp_path / "chain.yaml").write_text(yaml.safe_dump({"presets": {"chain": {"stages": orchestration.chain(4)}}}))
    assert len(resolve(tmp_path / "chain.yaml", "chain").pipeline.stages) == 4
    overrides = ["control.horizon_tokens=8192", "seed=1", "server.port=4310"]
    assert "eval_control" in resolve(pocket.with_control(tmp_path), "control", overrides).pipeline.stages


def test_the_rl_stages_of_learning_benchmarks_resolve(tmp_path):
    arguments = {agent_learns: (sys.executable,), verifiers_learns: ()}
    for benchmark, given in arguments.items():
        rl = benchmark.rl_stage(*given, steps=3)
        shutil.copytree(benchmark.FILES, tmp_path, dirs_exist_ok=True)
        file = gains.write_pipeline(tmp_path, "p", gains.stages_of("file:/calls.jsonl", rl), 4330)
        assert resolve(file, "p", ["seed=1"]).pipeline.stages["rl"].num_steps == 3
    document = yaml.safe_load((PROJECT / "pipeline.yaml").read_text())["presets"]["pocket"]["stages"]
    stages = saved_learns.variants(document["rl"], "/a", "/b")
    file = gains.write_pipeline(tmp_path, "p", {"sft": {"kind": "import", "model": "file:/m"}, **stages}, 4330)
    found = resolve(file, "p").pipeline.stages
    answers = [stage.num_steps * stage.rollout.prompts_per_step for stage in map(found.get, ("fresh", "half_steps"))]
    assert answers == [90 * 64] * 2, "as many sampled answers each"


def test_what_rl_learned_is_its_last_evaluation_over_its_first_and_a_failed_sample_counts_as_wrong(store, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model").write_text("")
    (tmp_path / "rollouts").mkdir()
    for step, rewards in {0: (1.0, 0.0, None, 0.0), 40: (0.0, 0.0, 0.0, 0.0), 90: (1.0, 1.0, 1.0, None)}.items():
        common = {"spans": (prompt_span([1]),), "sample_index": 0, "finish_reason": "stop"}
        found = [Rollout(group_id=f"{n}@0", prompt_id=str(n), reward=one, **common) for n, one in enumerate(rewards)]
        write_rollouts(tmp_path / "rollouts" / f"eval-{step:08d}.jsonl", found)
    folders = {"files": tmp_path / "files", "records": tmp_path}
    facts = {"config": {}, "lineage": {}, "sources": [], "metrics": {}, "cost": {"cpu_seconds": 2.0}, "environment": {}}
    learned = gains.learned(store, store.publish("a" * 40, kind="rl", stage="rl", **folders, **facts))
    assert (learned["sft"], learned["rl"], learned["gain"], learned["items"]) == (0.25, 0.75, 0.5, 4)


def test_the_gpu_benchmark_plans_every_part_for_a_gpu_and_for_a_toy():
    assert list(gpu.PARTS) == ["check", "stages", "pretrain-12", "pretrain-20", "sampler", "rl", "sync"]
    for part in gpu.PARTS:
        for tiny in (False, True):
            cases = gpu.cases_of(part, 79 << 30, tiny=tiny)
            assert len({case.name for case in cases}) == len(cases) > 0
            for case in cases:
                assert callable(getattr(gpu_parts, case.measure)) and case.timeout_s <= gpu.PART_S < 480
                assert case.options["device"] == ("cpu" if tiny else "cuda")
    variants = [case.options for case in gpu.cases_of("pretrain-20", 79 << 30)]
    assert {one["zero_stage"] for one in variants} == {0, 1, 2, 3} and all(one["depth"] == 20 for one in variants)
    assert {one["compile"] for one in variants} == {one["checkpointing"] for one in variants} == {True, False}
    assert [case.options["batch"] for case in gpu.cases_of("sampler", 79 << 30)] == [1, 1, 64, 64, 256, 256]


def test_a_micro_batch_of_the_gpu_benchmark_fits_its_gpu():
    cases = {(12, 79): 32_768, (20, 79): 32_768, (12, 23): 16_384, (20, 23): 4_096, (20, 1): 2_048}
    assert {(depth, gib): gpu.micro_batch_tokens(depth, gib << 30) for depth, gib in cases} == cases


def test_the_gpu_benchmark_says_at_once_what_is_lacking_and_how_to_bring_it(monkeypatch):
    monkeypatch.setattr(gpu, "_is_here", lambda module: module not in ("deepspeed", "rustbpe"))
    missing = gpu.lacking(["rl", "sampler", "stages"])
    assert missing == {"rl": ["deepspeed"], "sampler": [], "stages": ["deepspeed", "rustbpe"]}
    _, *commands = gpu.how_to_get(missing["stages"]).split("pip wheel ")
    assert [command.partition("==")[0].split()[-1] for command in commands[:2]] == missing["stages"]
    assert "cannot run here, lacking deepspeed" in gpu.planned({"rl": gpu.cases_of("rl", 79 << 30)}, missing)
    assert gpu.no_gpu(machine_of("1xH100"), "2.13.0") == []
    no_gpu, no_cuda = gpu.no_gpu(machine_of("cpu:2:avx2:8GiB"), "2.13.0+cpu")
    assert "a GPU" in no_gpu and "built for CUDA; this is 2.13.0+cpu" in no_cuda


def test_versions_outside_of_the_tested_ranges_are_named():
    found = {"python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.17.0", "deepspeed": "none"}
    assert gpu.untested(found) == []
    (sentence,) = gpu.untested(found | {"torch": "2.10.0"})
    assert sentence.startswith("torch 2.10.0 is outside of what was tested")


def test_a_plan_is_held_against_what_the_runs_stages_took():
    machine = machine_of("cpu:2:avx2:8GiB")
    pipeline = resolve(PROJECT / "pipeline.yaml", "pocket", machine=machine).pipeline
    plan = next(plan for plan in plan_of(pipeline, machine).stages if plan.name == "pretrain")
    cost = {"peak_bytes": plan.host_bytes / 2, "seconds": plan.seconds, "cpu_seconds": 100.0}
    stages = {"pretrain": stage_record(made={"cost": cost}, key="0" * 40), "sft": stage_record()}
    (row,) = plan_benchmark.compare(run_record("r", stages=stages), pipeline, machine)
    assert row["stage"] == "pretrain" and row["errors"]["memory"] == 1.0 and row["errors"]["seconds"] == 0.0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_gpu_benchmarks_stages_are_ones_that_workers_read_and_leave_nothing_to_the_machine(tmp_path, device):
    jobs = [(name, read_job(path)) for name, _, path in gpu_checks.stage_jobs(device, tmp_path)]
    assert [name for name, _ in jobs] == ["tokenizer", "pretrain", "midtrain", "sft", "rl", "eval"]
    assert {job.config.resources.device for _, job in jobs} == {device}
    of_machine = {str(value) for _, job in jobs for name, value in leaves(job.config) if name.startswith(OF_MACHINE)}
    assert "auto" not in of_machine
