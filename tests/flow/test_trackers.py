"""Trackers get the metrics: one run of theirs for each stage, continued after a retry; they never end a stage."""

import json
import os
import re
import subprocess
import sys
from functools import partial

import pytest

from nanodag.cli.show import print_status, show_status
from nanodag.config import resolve
from nanodag.errors import ConfigError
from nanodag.run.build_stage import build_stage, job_of
from nanodag.run.reproduce import reproduce
from nanodag.worker import tracker
from nanodag.worker.job import write_job
from tests.fake_stages import FAKES
from tests.fault.processes import wait_until
from tests.flow.tiny_runs import opened

WANDB = "tracking.trackers=[wandb]"
CALLS = "wandb.jsonl"
run_with = partial(opened, WANDB)


@pytest.fixture
def wandb(project, monkeypatch):
    """A project where `wandb` is the fake one; what it was called with, so far."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), str(FAKES / "trackers")]))
    monkeypatch.syspath_prepend(str(FAKES / "trackers"))
    monkeypatch.setenv("FAKE_WANDB", str(project / CALLS))
    monkeypatch.delenv("FAKE_WANDB_DO", raising=False)

    def calls(*names):
        path = project / CALLS
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["call"] in (names or (line["call"],))]

    yield calls
    sys.modules.pop("wandb", None)


def workspace_of(run, metrics=()):
    """The workspace of its tokenizer stage, with these lines of metrics."""
    job = job_of(run, "tokenizer", run.pipeline.stages["tokenizer"], {}, run.store.workspace("0" * 40))
    write_job(job)
    job.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return job.workspace


def line(step, **values):
    return {"event": "step", "step": step, "total": 4, "time": 1.0, **values}


def warnings_in(text):
    return [said.partition("WARNING ")[2] for said in text.splitlines() if "WARNING " in said]


def test_a_stage_is_one_run_of_wandb_with_its_config_steps_and_tables(wandb):
    run = run_with("tracking.project=chat", "tracking.tags=[cpu, tiny]", "tokenizer.seed=5", "tracking.entity=team")
    rows = [{"prompt": "1 + 1?", "reward": 1.0}, {"prompt": "2?", "reward": None}]
    metrics = [line(1, loss=1.0, text="no number"), line(2, loss=0.5, is_done=True), line(2, event="eval", score=7)]
    metrics.append(line(3, event="sample", responses=rows, ids=[1, 2]))
    tracker.follow("wandb", workspace_of(run, metrics), lambda: True)
    begin, *logs, end = wandb()
    config, run_id = begin.pop("config"), begin.pop("id")
    named = {"project": "chat", "entity": "team", "group": "r", "name": "r/tokenizer", "tags": ["cpu", "tiny"]}
    how = {"resume": "allow", "mode": None, "job_type": "tokenizer", "dir": str(run.store.local / "trackers")}
    assert begin == {"call": "init", **named, **how}
    about = {"run": "r", "stage": "tokenizer", "kind": "tokenizer", "preset": "tiny", "key": "0" * 40}
    assert config == json.loads(run.pipeline.stages["tokenizer"].model_dump_json()) | {"nanodag": about}
    assert config["seed"] == 5 and re.fullmatch("r-tokenizer-[0-9a-f]{8}", run_id)
    said = [(call["step"], call["data"]) for call in logs]
    table = {"columns": ["prompt", "reward"], "data": [["1 + 1?", 1.0], ["2?", None]]}
    numbers = [(1, {"tokenizer/loss": 1.0}), (2, {"tokenizer/loss": 0.5}), (2, {"tokenizer/score": 7.0})]
    assert said == [*numbers, (3, {"tokenizer/responses": table})]
    assert end == {"call": "finish"}


def test_an_id_of_ones_own_is_taken_and_offline_sends_nothing(wandb):
    run = run_with('tracking.id="{preset}.{stage}"', "tracking.group=all", "tracking.mode=offline")
    workspace = workspace_of(run)
    tracker.follow("wandb", workspace, lambda: True)
    (begin,) = wandb("init")
    assert [begin[name] for name in ("id", "group", "mode")] == ["tiny-tokenizer", "all", "offline"]
    assert tracker.urls_in(workspace) == {}


def test_a_retry_continues_the_run_and_status_has_its_url(wandb, tell, begun, capsys):
    run = run_with()
    thread, raised, _ = begun(run)
    wait_until(lambda: len(wandb("log")) == 2)
    tell("tokenizer", "fail")
    thread.join()
    url = f"https://wandb.test/me/nanodag/runs/{wandb('init')[0]['id']}"
    assert raised and trackers_in_status("r", capsys) == {"tokenizer": {"wandb": url}}
    assert len(wandb("finish")) == 0  # it is open for the next try
    tell("tokenizer", "")
    build_stage(run, "tokenizer", {})
    first, second, published = wandb("init")
    assert first["id"] == second["id"] == published["id"] and [call["step"] for call in wandb("log")] == [1, 2, 3, 4]
    show_status("r", file="", all_runs=False)
    assert f"tokenizer on wandb: {url}" in capsys.readouterr().out
    build_stage(run_with(name="other"), "tokenizer", {})  # finds it
    assert len(wandb("init")) == 3 and trackers_in_status("other", capsys) == {"tokenizer": {"wandb": url}}


def test_a_published_stage_is_an_artifact_by_reference(wandb, monkeypatch, capfd):
    run = run_with()
    result = build_stage(run, "tokenizer", {})
    (made,), (first, second) = wandb("log_artifact"), wandb("init")
    address = f"{run.store.local.as_uri()}/artifacts/{result.key}/{result.attempt}"
    facts = {"artifact": address, "digest": result.digest, "key": result.key}
    said = {"name": "r-tokenizer", "type": "tokenizer", "metadata": facts, "references": [address]}
    assert made == {"call": "log_artifact", **said} and first["id"] == second["id"]


def test_a_reference_that_fails_is_one_warning_and_of_a_run_that_never_opened_none(wandb, monkeypatch, capfd):
    monkeypatch.setenv("FAKE_WANDB_DO", "raise")
    workspace = workspace_of(run_with())
    (workspace / "trackers").mkdir()
    warnings = []
    for step in (3, -1):
        (workspace / "trackers" / "wandb.json").write_text(json.dumps({"id": "i", "url": "", "step": step}))
        tracker.TrackerProcesses(workspace, ["wandb", "trackio"], "file:///x", "d").close()
        warnings += warnings_in(capfd.readouterr().err)
    assert len(warnings) == 1
    assert "wandb gets no reference to the artifact of this stage: ConnectionError: no route to" in warnings[0]


def trackers_in_status(run, capsys):
    print_status(run, file="", all_runs=False)
    (status,) = json.loads(capsys.readouterr().out)
    assert status["run"] == run
    return {stage["name"]: stage["trackers"] for stage in status["stages"] if stage["trackers"]}


def test_a_stage_that_is_reproduced_is_no_run_of_a_tracker(wandb, project):
    file = project / "pipeline.yaml"
    file.write_text(file.read_text().replace("trackers: []", "trackers: [wandb]"))
    run = run_with()
    result = build_stage(run, "tokenizer", {})
    assert reproduce(run.store, run.store.attempt(result.key, result.attempt), file="").is_same
    assert len(wandb("init")) == 2  # with metrics, and with the artifact


@pytest.mark.parametrize(
    ("do", "warning"),
    [
        ("raise", "wandb gets no more metrics of this stage: ConnectionError: no route to api.wandb.ai"),
        ("raise-late", "wandb gets no more metrics of this stage: ValueError: the server said no"),
        ("die", "The process of wandb ended with code 9; it may lack metrics."),
        ("hang", "wandb did not finish within 0 s; it may lack the last metrics."),
    ],
)
def test_a_tracker_that_fails_costs_a_stage_one_warning(wandb, monkeypatch, caplog, capfd, do, warning):
    monkeypatch.setenv("FAKE_WANDB_DO", do)
    processes = tracker.TrackerProcesses(workspace_of(run_with(), [line(1, loss=1.0)]), ["wandb"])
    if do == "hang":
        wait_until(lambda: wandb("init"))
        monkeypatch.setattr(tracker, "FINISH_TIMEOUT_S", 0.3)
    processes.close()
    said = [*caplog.messages, *warnings_in(capfd.readouterr().err)]
    assert len(said) == 1 and said[0].endswith(warning)


def test_a_service_that_is_not_installed_is_one_warning(wandb):
    workspace = workspace_of(run_with())
    code = "import sys; sys.modules['trackio'] = None; from nanodag.worker.tracker import main; main()"
    command = [sys.executable, "-c", code, "trackio", str(workspace)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (said,) = warnings_in(done.stderr)
    assert "trackio gets no more metrics of this stage: ModuleNotFoundError" in said


def test_tensorboard_gets_every_step(project):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = opened("tracking.trackers=[tensorboard]")
    result = build_stage(run, "tokenizer", {})
    folder = run.store.verified(run.store.attempt(result.key, result.attempt), "records") / "tensorboard"
    board = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in board.Tensors("tokenizer/loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tracking.id=mine", "tracking.id: 'mine' is one id for all stages, which would write into one run; put"),
        ("tracking.name='{user}'", "tracking.name: '{user}' has {user}, which nothing fills in; there are {run}, {st"),
        ("tracking.trackers=[comet]", "tracking.trackers.0: must be "),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(project, override, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve(project / "pipeline.yaml", "tiny", [override])


def test_what_trackers_are_asked_is_no_setting_of_a_stage(project):
    plain, tracked = (resolve(project / "pipeline.yaml", "tiny", o).pipeline for o in ([], [WANDB]))
    assert plain.stages == tracked.stages and plain.tracking != tracked.tracking
