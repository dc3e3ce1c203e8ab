"""A sweep over fake stages, under a real Prefect server."""

from dataclasses import replace

import pytest

from flows.sweep import sweep
from nanodag.config.kinds import shipped
from nanodag.store import Store

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def store(project, monkeypatch):
    monkeypatch.setitem(shipped(), "eval", replace(shipped()["eval"], module="fake_eval"))
    return Store(project / "store")


def states_of(store, name):
    return {stage: entry.state for stage, entry in store.read_run(name).stages.items()}


def test_points_share_what_comes_before_and_one_that_fails_does_not_stop_the_others(store, tell):
    tell("sft-2", "fail")
    asked = {"grid": ("sft.seed=[1,2]",), "preset": "tiny", "at_once": 2}
    state = sweep("s", **asked, return_state=True)
    assert state.is_failed() and "sft-2 was told to fail" in state.message
    states = states_of(store, "s")
    assert states == {
        **{"tokenizer": "built", "pretrain": "built", "sft-1": "built", "eval_sft-1": "built"},
        **{"sft-2": "failed", "eval_sft-2": "not run", "comparison": "built"},
    }
    tell("sft-2", "")
    again = sweep("s", **asked, return_state=True)
    assert again.message == "2 points, 4 of 6 stages found in the store"
    built = {stage for stage, state in states_of(store, "s").items() if state == "built"}
    assert built == {"sft-2", "eval_sft-2", "comparison"}
    third = sweep("other-name", **asked, return_state=True)
    assert third.message == "2 points, 6 of 6 stages found in the store"
