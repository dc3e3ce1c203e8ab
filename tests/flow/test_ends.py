"""Which flows end with the process that serves them: all. No Prefect server here."""

import signal

import pytest

import tasks.stage_task
from flows.nightly_eval import nightly_eval
from flows.speedrun import speedrun
from flows.sweep import sweep
from nanodag.worker.respawn import SERVING


@pytest.mark.parametrize("flow", [speedrun, sweep, nightly_eval])
def test_a_served_flow_ends_with_what_serves_it_and_is_set_to_before_it_begins_anything(project, monkeypatch, flow):
    called = []
    monkeypatch.setattr(tasks.stage_task, "end_with_parent", lambda parent, signum: called.append((parent, signum)))
    monkeypatch.setenv(SERVING, "4711")  # its process may be gone already, and another one this one's parent
    assert flow.fn("no name").is_failed()
    assert not called, "by hand, in a process of the user's"
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "one")
    assert flow.fn("no name").is_failed()
    assert called == [(4711, signal.SIGTERM)]
