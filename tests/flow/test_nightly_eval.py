"""Nights over fake stages, under a real Prefect server."""

import json
from dataclasses import replace

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.deployments.runner import EntrypointType
from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL

import tasks.nightly
from flows.nightly_eval import nightly_eval, schedule
from flows.speedrun import speedrun
from nanodag.nightly.switch import read_switch, turn
from nanodag.run.kinds import KINDS
from nanodag.server.local_server import Api
from nanodag.store import Store
from tests.http_server import listening

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def store(project, monkeypatch):
    monkeypatch.setitem(KINDS, "eval", replace(KINDS["eval"], module="fake_eval"))
    assert speedrun("main-1", preset="tiny", return_state=True).is_completed()
    return Store(project / "store")


@pytest.fixture
def emitted(monkeypatch):
    found = []

    def remember(event, **about):
        found.append((event, about["payload"]))
        emit_event(event, **about)

    monkeypatch.setattr(tasks.nightly, "emit_event", remember)
    return found


@pytest.fixture
def listener():
    """The address of an HTTP server that keeps what is posted to it, and what it has."""
    with listening() as (url, posted):
        yield f"{url}/hook", posted


def make_main_2(project, num_right):
    """A newer run, whose base and tuned models answer that many items."""
    (project / "orders" / "answers.json").write_text(json.dumps({"2": num_right}))
    overrides = [f"{stage}.seed=2" for stage in ("pretrain", "sft")]
    assert speedrun("main-2", preset="tiny", overrides=overrides, return_state=True).is_completed()


def test_a_worse_model_fails_the_night_sends_an_event_and_is_posted(store, project, emitted, listener):
    address, posted = listener
    overrides = ["nightly.runs={main: main-*}", f"nightly.webhook={address}"]
    first = nightly_eval(name="nightly-1", overrides=overrides, return_state=True)
    assert first.is_completed(), first.message
    scores = store.read_run("nightly-1")["nightly"]["scores"]
    assert [(s["label"], s["stage"], s["run"], s["value"]) for s in scores] == [
        ("main", "pretrain", "main-1", 1.0),
        ("main", "sft", "main-1", 1.0),
    ]
    assert all(s["was_found"] for s in scores), "the run has evaluated them already"
    assert emitted == posted == []

    make_main_2(project, 80)
    second = nightly_eval(name="nightly-2", overrides=overrides, return_state=True)
    assert second.is_failed()
    assert "2 of 2 scores got worse" in second.message
    assert "main/sft x exact_match 0.8, 1 before: -0.2" in second.message and "(nightly-1)" in second.message
    ((event, payload),) = emitted
    assert event == "nanodag.nightly.worse" and len(payload["worse"]) == 2
    assert posted == [payload] and posted[0]["text"].startswith("nanodag nightly-2: 2 of 2 scores got worse\nmain/")
    record = store.read_run("nightly-2")
    assert record["state"] == "completed", "its evals are all there; what is worse is the models"
    assert [c["is_worse"] for c in record["nightly"]["comparisons"]] == [True, True]

    third = nightly_eval(name="nightly-3", overrides=overrides, return_state=True)
    assert third.is_completed(), "the same answers as last night are no news"
    entry = store.read_run("nightly-3")["stages"]["trend"]
    page = (store.materialize(store.attempt(entry["key"], entry["attempt"])) / "trend.html").read_text()
    assert page.count("<svg") == 2 and "unchanged" in page and "src=" not in page and "http-equiv" not in page
    with get_client(sync_client=True) as client:
        shown = [str(a.data) for a in client.read_artifacts() if a.key == "nightly-trend"]
    assert any("nightly-3" in text and "| main/sft (main-2)" in text and str(entry["key"]) in text for text in shown)


def test_seven_late_runs_of_the_schedule_are_one_night(store):
    ends = [nightly_eval(by_schedule=True, return_state=True) for _ in range(7)]
    assert [state.name for state in ends] == ["Completed"] + ["Skipped"] * 6
    assert len([name for name in store.runs() if name.startswith("nightly-")]) == 1


def test_an_eval_that_fails_fails_the_night_and_the_others_are_still_compared(store, tell):
    tell("newest-sft-eval_sft", "fail")
    overrides = ["nightly.stages=[pretrain,sft]"]
    store.change_run("main-1", lambda r: r["pipeline"]["stages"]["eval_sft"].update(seed=7))
    state = nightly_eval(name="nightly-1", overrides=overrides, return_state=True)
    assert state.is_failed() and "newest-sft-eval_sft was told to fail" in state.message
    record = store.read_run("nightly-1")
    assert record["state"] == "failed" and [s["stage"] for s in record["nightly"]["scores"]] == ["pretrain"]


def test_a_pinned_model_is_imported_and_evaluated(store, project):
    (project / "hf").mkdir()
    for name in ("config.json", "model.safetensors"):
        (project / "hf" / name).write_text("{}")
    overrides = ["nightly.runs={}", "nightly.models={tiny: {model: 'file:hf', evals: [eval_sft]}}"]
    state = nightly_eval(name="nightly-1", overrides=overrides, return_state=True)
    assert state.is_completed(), state.message
    ends = {name: stage["state"] for name, stage in store.read_run("nightly-1")["stages"].items()}
    assert ends == {"model-tiny": "built", "tiny-eval_sft": "built", "trend": "built"}


def serve():
    deployment = nightly_eval.to_deployment(
        "run-nightly-evals", entrypoint_type=EntrypointType.MODULE_PATH, **schedule()
    )
    return str(deployment.apply())


def test_the_switch_outlives_serving_and_a_changed_config_sets_it_again(project):
    api = Api(PREFECT_API_URL.value().removesuffix("/api"))
    pipeline = yaml.safe_load((project / "pipeline.yaml").read_text())
    pipeline["presets"]["tiny"]["nightly"] = {"enabled": False, "timezone": "Asia/Tokyo"}
    (project / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))
    deployment = serve()
    found = read_switch(api, deployment)
    assert not found["active"] and found["schedule"]["cron"] == "0 3 * * *"
    assert found["schedule"]["timezone"] == "Asia/Tokyo" and found["parameters"] == {"by_schedule": True}
    turn(api, deployment, active=True, parameters={"by_schedule": True, "preset": "tiny"})
    assert serve() == deployment
    found = read_switch(api, deployment)
    assert found["active"] and found["parameters"]["preset"] == "tiny"
    pipeline["presets"]["tiny"]["nightly"]["schedule"] = "30 4 * * *"
    (project / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))
    serve()
    found = read_switch(api, deployment)
    assert not found["active"] and found["schedule"]["cron"] == "30 4 * * *"
