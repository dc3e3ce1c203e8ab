"""Seven nights missed are one night caught up."""

import os
from datetime import UTC, datetime, timedelta

import psutil
import pytest

from nanodag.errors import StoreBusy
from nanodag.nightly.nights import Skipped, decide
from nanodag.store.provenance import process_started
from tests.nightly.made_nights import night_record

DUE = datetime(2026, 11, 27, 3, tzinfo=UTC)
TONIGHT = "nightly-20261127-0300"
# What Prefect hands out when serving begins again after a week: every night's flow run, all late, all at once.
LATE = [f"flow-run-{day}" for day in range(21, 28)]


def night(flow_run, *, due=DUE, process=None, **fields):
    """A night of that flow run. process: the one that is at it, None for no longer."""
    at_it = {"state": "running", "pid": process.pid, "pid_started": process_started(process)} if process else {}
    return night_record(TONIGHT, [], due=due.timestamp(), flow_run=flow_run, **at_it, **fields)


def taken_on(late, nights=()):
    """Which flow runs take a night on, when they come in this order and each ends before the next."""
    records, taken = list(nights), []
    for flow_run in late:
        decision = decide(records, DUE, flow_run)
        if not isinstance(decision, Skipped):
            taken.append((flow_run, decision))
            records.append(night(flow_run))
    return taken


@pytest.mark.parametrize(
    ("before", "has_room"),
    [
        ([], True),
        ([night("old", due=DUE - timedelta(days=7))], True),
        ([night("dead", state="interrupted")], True),  # its process was killed
        ([night("asked", due=DUE + timedelta(minutes=1), night={"by_schedule": False})], True),  # not the scheduled one
        ([night("mine", state="failed")], False),  # its own retry tries it again
        ([night("first", process=psutil.Process())], False),
    ],
)
def test_seven_late_runs_are_one_night_at_most_whatever_their_order(before, has_room):
    for late in (LATE, LATE[::-1]):
        assert taken_on(late, before) == [(late[0], TONIGHT)] * has_room


def test_a_night_that_failed_is_tried_again_by_its_own_retry_also_days_later():
    for now in (DUE, DUE + timedelta(days=3)):
        assert decide([night("mine", state="failed")], now, "mine") == TONIGHT


def test_a_night_under_way_is_named_to_others_and_waited_for_by_its_own_retry():
    under_way = night("mine", process=(other := psutil.Process(os.getppid())))
    assert "under way: flow run mine" in decide([under_way], DUE, "second").reason
    with pytest.raises(StoreBusy, match=f"under way in process {other.pid}"):
        decide([under_way], DUE, "mine")
