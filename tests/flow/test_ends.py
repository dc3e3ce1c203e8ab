"""Which flows end with the process that serves them: all. No Prefect server here."""

import pytest

import tasks.stage_task
from flows.nightly_eval import nightly_eval
from flows.speedrun import speedrun
from flows.sweep import sweep
from nanodag.errors import NanodagError
from nanodag.worker.respawn import SERVING


@pytest.mark.parametrize("flow", [speedrun, sweep, nightly_eval])
def test_a_served_flow_ends_with_what_serves_it_and_is_set_to_before_it_begins_anything(project, monkeypatch, flow):
    called = []
    monkeypatch.setattr(tasks.stage_task, "end_with_parent", called.append)
    monkeypatch.setenv(SERVING, "4711")  # its process may be gone already, and another one this one's parent
    with pytest.raises(NanodagError):
        flow.fn("no name")
    assert not called, "by hand, in a process of the user's"
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "one")
    with pytest.raises(NanodagError):
        flow.fn("no name")
    assert called == [4711]
