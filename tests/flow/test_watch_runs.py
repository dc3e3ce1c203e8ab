"""The automation that marks dead runs, as the server keeps it. That it does so is tested in tests/browser."""

from datetime import timedelta

import pytest
from prefect.client.orchestration import get_client

from flows import serve
from nanodag.server.local_server import HEARTBEAT_S

pytestmark = pytest.mark.usefixtures("prefect_server")


def test_it_is_registered_once_however_often_the_serving_process_starts(monkeypatch):
    changed = []
    with get_client(sync_client=True) as client:
        monkeypatch.setattr(client, "update_automation", lambda *given: changed.append(given))
        for _ in range(2):
            serve.watch_runs(client)
        found = client.read_automations_by_name(serve.WATCH)
        assert changed == [], "a change has the server forget whose heartbeats it waits for"
        monkeypatch.setattr(serve, "WITHIN", timedelta(seconds=60))
        serve.watch_runs(client)
    assert [automation.trigger.within for _, automation in changed] == [timedelta(seconds=60)]
    assert len(found) == 1 and found[0].enabled
    assert found[0].trigger.within == timedelta(seconds=90)
    assert found[0].trigger.after >= {"prefect.flow-run.Running"}, "one that died before its first heartbeat stayed"
    assert [action.state.value for action in found[0].actions] == ["CRASHED"]


def test_a_dead_run_is_marked_within_two_minutes_of_its_last_heartbeat():
    assert serve.WITHIN.total_seconds() >= 3 * HEARTBEAT_S, "two heartbeats may be lost"
    assert serve.WITHIN.total_seconds() + HEARTBEAT_S <= 120, "the window, and a heartbeat that was still to come"
