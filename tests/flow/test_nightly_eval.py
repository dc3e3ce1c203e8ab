"""Nights over fake stages, under a real Prefect server."""

import json
from dataclasses import replace

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.deployments.runner import EntrypointType
from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL

import flows.nightly_eval
import tasks.nightly
from flows.nightly_eval import nightly_eval, schedule
from flows.speedrun import speedrun
from nanodag.config.kinds import shipped
from nanodag.nightly.nights import read_switch, turn
from nanodag.server.prefect_api import Api
from tests.http_server import listening

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def store(project, completed, monkeypatch):
    monkeypatch.setitem(shipped(), "eval", replace(shipped()["eval"], module="fake_eval"))
    return completed("main-1")


@pytest.fixture
def unchecked(monkeypatch):
    """Nobody looks for the fake stages' benchmark."""
    monkeypatch.setattr(flows.nightly_eval, "check_night", lambda night: None)


@pytest.fixture
def emitted(monkeypatch):
    found = []

    def remember(event, **about):
        found.append((event, about["payload"]))
        emit_event(event, **about)

    monkeypatch.setattr(tasks.nightly, "emit_event", remember)
    return found


@pytest.fixture
def posted(monkeypatch):
    """What is posted to the address that env:HOOK names."""
    with listening() as (url, posted):
        monkeypatch.setenv("HOOK", f"{url}/hook")
        yield posted


def test_a_worse_model_fails_the_night_sends_an_event_and_is_posted(store, project, emitted, posted, unchecked):
    overrides = ["nightly.runs={main: main-*}", "notify.webhook=env:HOOK"]
    first = nightly_eval(name="nightly-1", overrides=overrides, return_state=True)
    assert first.is_completed(), first.message
    scores = store.read_run("nightly-1").night.scores
    found = [(score.label, score.stage, score.run, score.value) for score in scores]
    assert found == [("main", stage, "main-1", 1.0) for stage in ("pretrain", "sft")]
    assert all(s.was_found for s in scores), "the run has evaluated them already"
    assert emitted == posted == []

    # A newer run, whose base and tuned models answer 80 items.
    (project / "orders" / "answers.json").write_text(json.dumps({"2": 80}))
    newer = ["pretrain.seed=2", "sft.seed=2"]
    assert speedrun("main-2", overrides=newer, return_state=True).is_completed()
    second = nightly_eval(name="nightly-2", overrides=overrides, return_state=True)
    assert second.is_failed() and "2 of 2 scores got worse" in second.message
    assert "main/sft x exact_match 80.0 %, 100.0 % before: −20.0 points" in second.message
    assert "(nightly-1)" in second.message
    ((event, payload),) = emitted
    assert event == "nanodag.nightly.worse" and len(payload["worse"]) == 2
    (told,) = posted
    assert told["text"].startswith("nanodag nightly_eval nightly-2: Failed\n2 of 2 scores got worse:\nmain/")
    assert payload["worse"][0] in told["message"] and "nanodag nightly show nightly-2" in told["text"]
    record = store.read_run("nightly-2")
    assert record.state == "completed", "its evals are all there; what is worse is the models"

    third = nightly_eval(name="nightly-3", overrides=overrides, return_state=True)
    assert third.is_completed() and len(posted) == 1, "the same answers as last night are no news"
    entry = store.read_run("nightly-3").stages["trend"]
    page = (store.materialize(store.attempt(*entry.artifact)) / "trend.html").read_text()
    assert page.count("data-panel=") == 2 and "unchanged" in page and "src=" not in page.partition("<script")[0]
    with get_client(sync_client=True) as client:
        shown = [str(a.data) for a in client.read_artifacts() if a.key == "nightly-trend"]
    assert any("nightly-3" in text and "| main/sft (main-2)" in text and entry.key in text for text in shown)


def test_seven_late_runs_of_the_schedule_are_one_night(store, unchecked):
    ends = [nightly_eval(by_schedule=True, return_state=True) for _ in range(7)]
    assert [state.name for state in ends] == ["Completed"] + ["Skipped"] * 6
    assert len([name for name in store.runs() if name.startswith("nightly-")]) == 1


def test_a_night_with_an_unknown_benchmark_is_refused_before_an_eval_starts(store):
    state = nightly_eval(name="nightly-1", return_state=True)
    said = "newest-pretrain-eval_base.benchmarks.0: Benchmark 'x' has no form 'x'"
    assert state.is_failed() and said in state.message
    record = store.read_run("nightly-1")
    assert record.state == "failed" and {s.state for s in record.stages.values()} == {"not run"}


def test_a_night_that_cannot_begin_is_told_of(project, posted):
    state = nightly_eval(name="nightly-1", overrides=["notify.webhook=env:HOOK"], return_state=True)
    assert state.is_failed()
    (told,) = posted
    assert (told["run"], told["state"]) == ("nightly-1", "Failed") and "is there to be evaluated" in told["message"]


def test_an_eval_that_fails_fails_the_night_and_the_others_are_still_compared(store, tell, unchecked):
    tell("newest-sft-eval_sft", "fail")
    overrides = ["nightly.stages=[pretrain,sft]"]

    def with_another_seed(record):
        stages = {**record.pipeline["stages"]}
        stages["eval_sft"] = {**stages["eval_sft"], "seed": 7}
        return record.changed(pipeline={**record.pipeline, "stages": stages})

    store.change_run("main-1", with_another_seed)
    state = nightly_eval(name="nightly-1", overrides=overrides, return_state=True)
    assert state.is_failed() and "newest-sft-eval_sft was told to fail" in state.message
    record = store.read_run("nightly-1")
    assert record.state == "failed" and [score.stage for score in record.night.scores] == ["pretrain"]


def test_a_pinned_model_is_imported_and_evaluated(store, project, unchecked):
    (project / "hf").mkdir()
    for name in ("config.json", "model.safetensors"):
        (project / "hf" / name).write_text("{}")
    overrides = ["nightly.runs={}", "nightly.models={tiny: {model: 'file:hf', evals: [eval_sft]}}"]
    state = nightly_eval(name="nightly-1", overrides=overrides, return_state=True)
    assert state.is_completed(), state.message
    ends = {name: stage.state for name, stage in store.read_run("nightly-1").stages.items()}
    assert ends == {"model-tiny": "built", "tiny-eval_sft": "built", "trend": "built"}


def test_the_switch_outlives_serving_and_a_changed_config_sets_it_again(project):
    api = Api(PREFECT_API_URL.value().removesuffix("/api"))
    pipeline = yaml.safe_load((project / "pipeline.yaml").read_text())

    def serve(**nightly):
        pipeline["presets"]["tiny"]["nightly"] = {"enabled": False, "timezone": "Asia/Tokyo", **nightly}
        (project / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))
        how = {"entrypoint_type": EntrypointType.MODULE_PATH, **schedule()}
        return str(nightly_eval.to_deployment("run-nightly-evals", **how).apply())

    deployment = serve()
    found = read_switch(api, deployment)
    assert not found["active"] and found["schedule"]["cron"] == "0 3 * * *"
    assert found["schedule"]["timezone"] == "Asia/Tokyo" and found["parameters"] == {"by_schedule": True}
    turn(api, deployment, active=True, parameters={"by_schedule": True, "preset": "tiny"})
    assert serve() == deployment
    found = read_switch(api, deployment)
    assert found["active"] and found["parameters"]["preset"] == "tiny"
    serve(schedule="30 4 * * *")
    found = read_switch(api, deployment)
    assert not found["active"] and found["schedule"]["cron"] == "30 4 * * *"
