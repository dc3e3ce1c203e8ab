"""One stage of a run, alone."""

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort

from flows.run_stage import run_stage
from flows.speedrun import speedrun
from nanodag.run.record import state_of
from nanodag.store import Store

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def store(project, monkeypatch):
    monkeypatch.setenv("NANODAG_STORE", str(project / "store"))
    assert speedrun("r", preset="tiny", return_state=True).is_completed()
    return Store(project / "store")


def test_a_stage_alone_has_the_pipelines_key_and_force_adds_an_attempt(store):
    before = store.read_run("r").stages
    assert run_stage("r", "sft", return_state=True).message == "1 stage, 1 of them found in the store"
    assert run_stage("r", "sft", force=True, return_state=True).is_completed()
    after = store.read_run("r").stages
    assert after["sft"].artifact == (before["sft"].key, "0002")
    assert store.read_run("r").state == "completed"
    assert {n: s for n, s in after.items() if n != "sft"} == {n: s for n, s in before.items() if n != "sft"}


def test_an_override_of_the_stage_makes_another_key_and_one_of_another_stage_is_refused(store):
    before = store.read_run("r").stages["sft"].key
    done = run_stage("r", "sft", overrides=("sft.seed=9",), return_state=True)
    assert done.is_completed() and store.read_run("r").stages["sft"].key != before
    assert done.message.endswith("Stale now: eval_sft, report; build again with: nanodag rerun r --stale")
    with get_client(sync_client=True) as client:
        wanted = ArtifactFilter(key=ArtifactFilterKey(any_=["run-r"]))
        text = client.read_artifacts(artifact_filter=wanted, sort=ArtifactSort.CREATED_DESC, limit=1)[0].data
    assert "eval\\_sft is stale: sft was built since" in text
    same = {"preset": "tiny", "overrides": ("sft.seed=9",), "return_state": True}
    kept = speedrun("r", **same)
    assert kept.message.startswith("4 stages, 4 of them found") and "Stale now: eval_sft, report" in kept.message
    mended = speedrun("r", stale="only", return_state=True)
    assert mended.message == "2 stages, 0 of them found in the store"
    assert state_of(store.read_run("r")) == "completed"
    state = run_stage("r", "sft", overrides=("pretrain.seed=9",), return_state=True)
    assert state.is_failed() and state.message.startswith("Override 'pretrain.seed=9' is not of stage sft")


def test_a_stage_whose_input_is_missing_says_which(store, project):
    store.change_run("r", lambda record: record.with_stage("pretrain", state="failed"))
    state = run_stage("r", "sft", return_state=True)
    assert state.is_failed() and "Stage sft of run r needs stage pretrain, which is failed" in state.message
    kept = store.read_run("r").stages["sft"]
    assert (kept.made.attempt, kept.state) == ("0001", "found"), "what was there before is still known"
    assert run_stage("nobody", "sft", return_state=True).is_failed()
