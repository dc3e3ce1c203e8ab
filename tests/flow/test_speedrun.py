"""Whole flows on fake stages, under a real Prefect server: pipelines, one stage alone, sweeps."""

import json
import os
import signal
import threading
from dataclasses import replace

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.sorting import ArtifactSort

from flows.run_stage import run_stage
from flows.speedrun import speedrun
from flows.sweep import sweep
from nanodag.config.kinds import shipped
from nanodag.run.record import state_of
from nanodag.store import Store
from tasks.stage_task import metrics_table
from tests.fake_stages import NO_TRACKERS, STAGES
from tests.fault.processes import pids_in, wait_until

pytestmark = pytest.mark.usefixtures("prefect_server", "project")


def record_of(name, project):
    return Store(project / "store").read_run(name)


def states_of(name, project):
    return {stage: entry.state for stage, entry in record_of(name, project).stages.items()}


def built_in(name, project):
    return {stage for stage, state in states_of(name, project).items() if state == "built"}


def test_one_changed_option_rebuilds_its_stage_and_what_follows(project, completed):
    completed("r")
    overrides = ("sft.num_epochs=2", "pretrain.log_every=1", "pretrain.timeout_s=99")  # the last two change no result
    again = speedrun("second", overrides=overrides, return_state=True)
    assert again.message == "6 stages, 5 of them found in the store"
    # The fake makes the same bytes whatever its epochs, and equal bytes need no rebuilding of what takes them.
    assert built_in("second", project) == {"sft"} and record_of("second", project).state == "completed"
    assert speedrun("third", overrides=("sft.seed=2",), return_state=True).is_completed()
    assert built_in("third", project) == {"sft", "eval_sft", "report"}


def test_a_failed_stage_loses_what_needs_it_and_no_more_and_a_resumed_run_builds_that(project, tell):
    for stage in ("eval_base", "sft"):
        tell(stage, "fail")
    state = speedrun("r", return_state=True)
    assert state.is_failed() and "eval_sft" in state.message
    assert all(f"{stage} was told to fail" in state.message for stage in ("eval_base", "sft"))
    failed = {"eval_base": "failed", "sft": "failed", "eval_sft": "not run"}
    assert states_of("r", project) == {"tokenizer": "built", "pretrain": "built", "report": "built", **failed}
    for stage in ("eval_base", "sft"):
        tell(stage, "")
    assert speedrun("r", return_state=True).is_completed()
    assert built_in("r", project) == {*failed, "report"}


def test_a_killed_worker_is_started_again_and_goes_on_from_its_checkpoint(project, tell):
    tell("sft", "wait")
    ended = []
    thread = threading.Thread(target=lambda: ended.append(speedrun("r", return_state=True)))
    thread.start()
    work = project / "store" / "work"

    def is_at_step_2(path):
        return json.loads((path.parent / "job.json").read_text())["name"] == "sft" and '"step": 2' in path.read_text()

    lines = wait_until(lambda: [path for path in work.glob("*/metrics.jsonl") if is_at_step_2(path)])
    os.kill(pids_in(lines[0].parent)[-1], signal.SIGKILL)
    tell("sft", "")
    thread.join(120)
    assert ended[0].is_completed()
    assert record_of("r", project).stages["sft"].made.cost["num_attempts"] == 2


def test_a_lost_sampler_is_tried_again_and_a_nan_is_not(project, tell):
    tell("tokenizer", "once nanodag.errors:SamplerLost it is gone")
    tell("sft", "once nanodag.errors:TrainingDiverged loss is nan")
    state = speedrun("r", return_state=True)
    assert state.is_failed() and state.message.startswith("Stage sft diverged: loss is nan")
    with get_client(sync_client=True) as client:
        flow_run = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        ends = {task.name: task.state for task in client.read_task_runs(flow_run_filter=flow_run)}
        artifacts = client.read_artifacts(flow_run_filter=flow_run)
    assert ends["sft"].is_failed() and ends["sft"].message.startswith("Stage sft diverged: loss is nan")
    stages = record_of("r", project).stages
    assert (stages["tokenizer"].state, stages["tokenizer"].made.cost["num_attempts"]) == ("built", 2)
    assert stages["sft"].state == "failed" and "What to do: " in stages["sft"].reason
    shown = [a.data for a in artifacts if "# sft of r failed" in str(a.data)]
    assert len(shown) == 1
    assert f"[{stages['sft'].workspace}](file://{stages['sft'].workspace})" in shown[0]
    assert "What to do: " in shown[0] and "Traceback" in shown[0]


def test_a_branch_goes_on_beside_one_that_takes_the_other_core(project, tell):
    half = {"resources": {"threads": 1, "device": "cpu"}}
    branches = {
        "first": {**STAGES["sft"], **half, "seed": 2},
        "eval_first": {**STAGES["eval_sft"], "inputs": {"model": "first"}},
        "sft": {**STAGES["sft"], **half},
        "whole": {**STAGES["sft"], "seed": 3},
    }
    stages = {"tokenizer": STAGES["tokenizer"], "pretrain": STAGES["pretrain"], **branches}
    presets = {"tiny": {"stages": stages, "tracking": NO_TRACKERS}}
    (project / "pipeline.yaml").write_text(yaml.safe_dump({"default": "tiny", "presets": presets}))
    tell("first", "wait")
    ended = []
    thread = threading.Thread(target=lambda: ended.append(speedrun("r", return_state=True)))
    thread.start()
    # The store's folder is there before the run's record.
    wait_until(lambda: [*project.glob("store/runs/r.json")] and built_in("r", project) >= {"sft"}, timeout_s=120)
    assert states_of("r", project)["first"] == "running"
    tell("first", "")
    thread.join(120)
    assert ended[0].is_completed() and built_in("r", project) == {*stages}


@pytest.fixture
def store(completed):
    return completed("r")


def test_a_stage_alone_has_the_pipelines_key_and_force_adds_an_attempt(store):
    before = store.read_run("r").stages
    assert run_stage("r", "sft", return_state=True).message == "1 stage, 1 of them found in the store"
    assert run_stage("r", "sft", force=True, return_state=True).is_completed()
    after = store.read_run("r").stages
    assert after["sft"].artifact == (before["sft"].key, "0002")
    assert store.read_run("r").state == "completed"
    assert {n: s for n, s in after.items() if n != "sft"} == {n: s for n, s in before.items() if n != "sft"}


def test_an_override_of_the_stage_makes_another_key_and_what_follows_stale(store):
    before = store.read_run("r").stages["sft"].key
    done = run_stage("r", "sft", overrides=("sft.seed=9",), return_state=True)
    assert done.is_completed() and store.read_run("r").stages["sft"].key != before
    assert done.message.endswith("Stale now: eval_sft, report; build again with: nanodag rerun r --stale")
    with get_client(sync_client=True) as client:
        wanted = ArtifactFilter(key=ArtifactFilterKey(any_=["run-r"]))
        text = client.read_artifacts(artifact_filter=wanted, sort=ArtifactSort.CREATED_DESC, limit=1)[0].data
    assert "eval\\_sft is stale: sft was built since" in text
    kept = speedrun("r", overrides=("sft.seed=9",), return_state=True)
    assert kept.message.startswith("4 stages, 4 of them found") and "Stale now: eval_sft, report" in kept.message
    mended = speedrun("r", stale="only", return_state=True)
    assert mended.message == "2 stages, 0 of them found in the store"
    assert state_of(store.read_run("r")) == "completed"


def test_a_stage_whose_input_is_missing_says_which(store, project):
    store.change_run("r", lambda record: record.with_stage("pretrain", state="failed"))
    state = run_stage("r", "sft", return_state=True)
    assert state.is_failed() and "Stage sft of run r needs stage pretrain, which is failed" in state.message
    kept = store.read_run("r").stages["sft"]
    assert (kept.made.attempt, kept.state) == ("0001", "found"), "what was there before is still known"
    assert run_stage("nobody", "sft", return_state=True).is_failed()


def test_points_share_what_comes_before_and_one_that_fails_does_not_stop_the_others(project, tell, monkeypatch):
    monkeypatch.setitem(shipped(), "eval", replace(shipped()["eval"], module="fake_eval"))
    tell("sft-2", "fail")
    asked = {"grid": ("sft.seed=[1,2]",), "at_once": 2}
    state = sweep("s", **asked, return_state=True)
    assert state.is_failed() and "sft-2 was told to fail" in state.message
    assert states_of("s", project) == {
        **{"tokenizer": "built", "pretrain": "built", "sft-1": "built", "eval_sft-1": "built"},
        **{"sft-2": "failed", "eval_sft-2": "not run", "comparison": "built"},
    }
    tell("sft-2", "")
    again = sweep("s", **asked, return_state=True)
    assert again.message == "2 points, 4 of 6 stages found in the store"
    assert built_in("s", project) == {"sft-2", "eval_sft-2", "comparison"}
    assert sweep("other-name", **asked, return_state=True).message == "2 points, 6 of 6 stages found in the store"


def test_a_hopeless_point_of_a_sweep_is_ended_early_stays_so_and_goes_on_when_asked_for(project, tell, monkeypatch):
    monkeypatch.setitem(shipped(), "eval", replace(shipped()["eval"], module="fake_eval"))
    for stage, loss in {"sft-1": 2.0, "sft-2": 1.0, "sft-3": 3.0}.items():
        tell(stage, f"measure {loss}")
    held_out = json.dumps([{"url": f"file:{project / 'text.txt'}", "held_out": 0.1}])
    asked = {"grid": ("sft.seed=[1,2,3]",), "overrides": (f"sft.data={held_out}",)}
    state = sweep("s", **asked, halving=3, return_state=True)
    assert state.message == "3 points, 0 of 6 stages found in the store, 1 point ended early"
    kept = {stage: entry for stage, entry in states_of("s", project).items() if stage[-1] in "123"}
    assert kept == dict.fromkeys(("sft-1", "sft-2", "eval_sft-1", "eval_sft-2"), "built") | {
        "sft-3": "stopped",
        "eval_sft-3": "not run",
    }
    again = sweep("s", **asked, halving=3, return_state=True)
    assert again.message == "3 points, 6 of 6 stages found in the store, 1 point ended early"
    store = Store(project / "store")
    page = store.materialize(store.get("s:comparison")) / "sweep.md"
    assert "its validation loss of 3 was not among the best 1/3 of the points that came so far" in page.read_text()
    assert sweep("s", **asked, return_state=True).message == "3 points, 6 of 8 stages found in the store"
    log = store.verified(store.get("s:sft-3"), "records") / "metrics.jsonl"
    begun_at = [
        line["resumed_from"] for line in map(json.loads, log.read_text().splitlines()) if "resumed_from" in line
    ]
    assert begun_at[-1] > 0


def test_each_row_has_a_name_a_value_and_its_unit_scores_in_percent_and_what_is_kept_by_benchmark_one_each():
    cost = {"seconds": 250.0, "peak_bytes": 3 * 2**29, "tokens": 327_680, "mfu": 0.31, "start_s": 2.5, "device": "a|b"}
    assert metrics_table("cost", cost) == [
        "| cost | value | unit |",
        "|---|---:|---|",
        "| seconds | 4 min 10 s |  |",
        "| peak bytes | 1.6 GB |  |",
        "| tokens | 328 k | tokens |",
        "| mfu | 31.0 | % |",
        "| start | 2.5 s |  |",
        "| device | a\\|b |  |",
    ]
    assert metrics_table("reached", {"sort": 0.415, "bits_per_byte": 1.8431}, is_scores=True)[2:] == [
        "| sort | 41.5 | % |",
        "| bits per byte | 1.843 | bits a byte |",
    ]
    assert metrics_table("cost", {"seconds_by_benchmark": {"sort": 2.4, "reverse": 1.5}})[2:] == [
        "| seconds by benchmark sort | 2.4 s |  |",
        "| seconds by benchmark reverse | 1.5 s |  |",
    ]
