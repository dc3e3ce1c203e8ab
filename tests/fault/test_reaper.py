"""A reaper ends as the program that goes on in its fork, and nothing that this one started outlives it."""

import os
import signal
import subprocess
import sys

import pytest

from nanodag.children.reaper import KILL
from tests.fault.processes import is_running, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans over")
PROGRAM = """
import os, subprocess, sys, time
from nanodag.children.reaper import keep
keep(os.getppid())
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(600)
"""


def kept(ended, *command):
    """The process, and those of the program and of what this has started."""
    process = subprocess.Popen(
        [sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    ended.append(process)
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize(
    ("end", "signum", "code"),
    [
        ("os._exit(3)", 0, 3),
        ("os.kill(os.getpid(), 11)", 0, -11),
        ("time.sleep(600)", signal.SIGTERM, -signal.SIGTERM),
        ("time.sleep(600)", KILL, -signal.SIGKILL),
    ],
)
def test_a_reaper_ends_as_its_program_does_and_ends_what_that_has_left(ended, end, signum, code):
    reaper, pids = kept(ended, PROGRAM + end)
    if signum:
        reaper.send_signal(signum)
    assert reaper.wait(60) == code and len(pids) == 2
    assert not [pid for pid in pids if is_running(pid)]


def test_a_program_and_all_that_it_has_started_end_with_the_parent_of_its_reaper(ended):
    parent, pids = kept(ended, PARENT, PROGRAM + "time.sleep(600)")
    os.killpg(parent.pid, signal.SIGKILL)
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))
