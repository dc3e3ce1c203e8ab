"""What benchmarks read of the library: records of runs, and pipelines that still resolve."""

import pytest
import yaml

from benchmarks import orchestration, pocket, retry
from benchmarks import plan as plan_benchmark
from benchmarks import store as store_benchmark
from nanodag.config import resolve
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from nanodag.plan.make import plan_of
from nanodag.store import Store
from tests.run_records import run_record, stage_record

COST = {"seconds": 2.0, "start_s": 1.0, "work_s": 0.5}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def filled(store, tmp_path):
    """A run of ten stages."""
    store_benchmark.fill(store, 10, tmp_path / "product")
    return store


def test_the_store_that_commands_are_timed_on_has_whole_records(filled):
    record = filled.read_run("run-0000")
    assert len(record.stages) == 10 and record.state == "completed" and not filled.unreadable_runs()
    assert pocket.artifact_of(filled, "run-0000", "s3").stage == "s3"


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


def test_a_plan_is_held_against_what_the_runs_stages_took():
    machine = machine_of("cpu:2:avx2:8GiB")
    pipeline = resolve(PROJECT / "pipeline.yaml", "pocket", machine=machine).pipeline
    plan = next(plan for plan in plan_of(pipeline, machine).stages if plan.name == "pretrain")
    cost = {"peak_bytes": plan.host_bytes / 2, "seconds": plan.seconds, "cpu_seconds": 100.0}
    record = run_record(
        "r", stages={"pretrain": stage_record(made={"cost": cost}, key="0" * 40), "sft": stage_record()}
    )
    (row,) = plan_benchmark.compare(record, pipeline, machine)
    assert row["stage"] == "pretrain" and row["errors"]["memory"] == 1.0 and row["errors"]["seconds"] == 0.0
