"""The whole flow on fake stages, under a real Prefect server."""

import json
import os
import signal
import threading

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from flows.speedrun import speedrun
from nanodag.store import Store
from tests.fault.processes import pids_in, wait_until

pytestmark = pytest.mark.usefixtures("prefect_server", "project")


def record_of(name, project):
    return Store(project / "store").read_run(name)


def states_of(name, project):
    return {stage: entry.state for stage, entry in record_of(name, project).stages.items()}


def test_every_stage_is_built_then_found(project):
    state = speedrun("first", preset="tiny", return_state=True)
    assert state.is_completed(), state.message
    assert set(states_of("first", project).values()) == {"built"}
    again = speedrun("second", preset="tiny", return_state=True)
    assert again.message == "6 stages, 6 of them found in the store"
    assert set(states_of("second", project).values()) == {"found"}
    assert record_of("second", project).state == "completed"


def test_one_changed_option_rebuilds_its_stage_and_what_follows(project):
    speedrun("first", preset="tiny", return_state=True)
    state = speedrun("second", preset="tiny", overrides=("sft.num_epochs=2",), return_state=True)
    assert state.is_completed()
    states = states_of("second", project)
    assert {stage for stage, state in states.items() if state == "built"} == {"sft"}
    # The fake makes the same bytes whatever its epochs, and equal bytes need no rebuilding of what takes them.
    assert states["eval_sft"] == states["report"] == "found"
    state = speedrun("third", preset="tiny", overrides=("sft.seed=2",), return_state=True)
    built = {stage for stage, state in states_of("third", project).items() if state == "built"}
    assert built == {"sft", "eval_sft", "report"}


def test_a_failed_eval_loses_no_training_and_fails_the_run(project, tell):
    tell("eval_base", "fail")
    state = speedrun("r", preset="tiny", return_state=True)
    assert state.is_failed()
    assert "eval_base was told to fail" in state.message
    states = states_of("r", project)
    assert states.pop("eval_base") == "failed"
    assert set(states.values()) == {"built"}, "training, the other eval and the report of what there is"


def test_what_needs_a_failed_stage_is_not_run(project, tell):
    tell("sft", "fail")
    state = speedrun("r", preset="tiny", return_state=True)
    assert state.is_failed() and "sft was told to fail" in state.message and "eval_sft" in state.message
    states = states_of("r", project)
    assert states == {
        "tokenizer": "built",
        "pretrain": "built",
        "eval_base": "built",
        "sft": "failed",
        "eval_sft": "not run",
        "report": "built",
    }
    tell("sft", "")
    assert speedrun("r", preset="tiny", return_state=True).is_completed()
    states = states_of("r", project)
    assert {s for s, state in states.items() if state == "built"} == {"sft", "eval_sft", "report"}


def test_a_killed_worker_is_started_again_and_goes_on_from_its_checkpoint(project, tell):
    tell("sft", "wait")
    ended = []
    thread = threading.Thread(target=lambda: ended.append(speedrun("r", preset="tiny", return_state=True)))
    thread.start()
    work = project / "store" / "work"
    lines = wait_until(lambda: [p for p in work.glob("*/metrics.jsonl") if is_at_step_2(p, "sft")])
    os.kill(pids_in(lines[0].parent)[-1], signal.SIGKILL)
    tell("sft", "")
    thread.join(120)
    assert ended[0].is_completed()
    assert record_of("r", project).stages["sft"].made.cost["num_attempts"] == 2


def test_a_lost_sampler_is_tried_again_and_a_nan_is_not(project, tell):
    tell("tokenizer", "once nanodag.errors:SamplerLost it is gone")
    tell("sft", "once nanodag.errors:TrainingDiverged loss is nan")
    state = speedrun("r", preset="tiny", return_state=True)
    assert state.is_failed() and state.message.startswith("Stage sft diverged: loss is nan")
    with get_client(sync_client=True) as client:
        flow_run = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        ends = {task.name: task.state for task in client.read_task_runs(flow_run_filter=flow_run)}
    assert ends["sft"].is_failed() and ends["sft"].message.startswith("Stage sft diverged: loss is nan")
    stages = record_of("r", project).stages
    assert (stages["tokenizer"].state, stages["tokenizer"].made.cost["num_attempts"]) == ("built", 2)
    assert stages["sft"].state == "failed"
    shown = [a.data for a in artifacts_of(state.state_details.flow_run_id) if "# sft of r failed" in str(a.data)]
    assert len(shown) == 1
    assert f"[{stages['sft'].workspace}](file://{stages['sft'].workspace})" in shown[0]
    assert "What to do: " in shown[0] and "Traceback" in shown[0]


def artifacts_of(flow_run):
    with get_client(sync_client=True) as client:
        return client.read_artifacts(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])))


def is_at_step_2(path, stage):
    return json.loads((path.parent / "job.json").read_text())["name"] == stage and '"step": 2' in path.read_text()
