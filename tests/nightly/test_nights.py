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
# What Prefect hands out when serving begins again after a week: every night's flow run, all late, all at once.
LATE = [f"flow-run-{day}" for day in range(21, 28)]


def taken_on(late, nights=()):
    """Which flow runs take a night on, when they come in this order and each ends before the next."""
    records, taken = list(nights), []
    for flow_run in late:
        decision = decide(records, DUE, flow_run)
        if not isinstance(decision, Skipped):
            taken.append((flow_run, decision))
            records.append(night_record(decision, [], due=DUE.timestamp(), flow_run=flow_run))
    return taken


def test_seven_late_runs_are_one_night_whatever_their_order():
    assert taken_on(LATE) == [("flow-run-21", "nightly-20261127-0300")]
    assert taken_on(LATE[::-1]) == [("flow-run-27", "nightly-20261127-0300")]


def test_a_night_of_last_week_does_not_count_as_tonights():
    before = night_record("nightly-20261120-0300", [], due=(DUE - timedelta(days=7)).timestamp(), flow_run="old")
    assert taken_on(LATE, [before]) == [("flow-run-21", "nightly-20261127-0300")]


def test_late_runs_that_start_together_leave_it_to_the_one_that_is_at_it():
    process = psutil.Process()
    alive = {"state": "running", "pid": process.pid, "pid_started": process.create_time()}
    under_way = night_record("nightly-20261127-0300", [], due=DUE.timestamp(), flow_run="first", **alive)
    assert taken_on(LATE, [under_way]) == []
    assert "under way: flow run first" in decide([under_way], DUE, "second").reason


def test_a_night_that_failed_is_not_tried_again_by_the_late_ones_but_by_its_own_retry():
    failed = night_record("nightly-20261127-0300", [], due=DUE.timestamp(), flow_run="mine", state="failed")
    assert taken_on(LATE, [failed]) == []
    assert decide([failed], DUE, "mine") == "nightly-20261127-0300"
    assert decide([failed], DUE + timedelta(days=3), "mine") == "nightly-20261127-0300", "a retry days later"


def test_a_night_whose_process_was_killed_is_taken_over_once():
    killed = night_record("nightly-20261127-0300", [], due=DUE.timestamp(), flow_run="dead", state="interrupted")
    assert taken_on(LATE, [killed]) == [("flow-run-21", "nightly-20261127-0300")]


def test_a_night_that_was_asked_for_does_not_stand_for_the_scheduled_one():
    asked = night_record("nightly-20261127-0900", [], due=DUE.timestamp() + 60, flow_run="asked")
    asked["nightly"]["by_schedule"] = False
    assert len(taken_on(LATE, [asked])) == 1


def test_a_retry_waits_for_the_process_that_is_still_at_its_night():
    other = psutil.Process(os.getppid())
    alive = {"state": "running", "pid": other.pid, "pid_started": process_started(other)}
    under_way = night_record("nightly-20261127-0300", [], due=DUE.timestamp(), flow_run="mine", **alive)
    with pytest.raises(StoreBusy, match=f"under way in process {other.pid}"):
        decide([under_way], DUE, "mine")
