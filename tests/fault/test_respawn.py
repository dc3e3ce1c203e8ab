"""The supervisor keeps its command running, and nothing that it started outlives it."""

import os
import signal
import subprocess
import sys

import pytest

from tests.fault.processes import is_running, wait_until

COMMAND = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
PARENT = """
import subprocess, sys, time
code = "import os, time; from nanodag.children.tree import end_with_parent; end_with_parent(os.getppid())"
code += "; print(os.getpid(), flush=True)"
subprocess.Popen([sys.executable, "-c", code + "; time.sleep(600)"], stderr=STDERR)
time.sleep(600)
"""


@pytest.fixture
def keep(ended):
    """Start a supervisor of some Python code in a group of its own, its output readable."""

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        ended.append(process)
        return process

    return start


def test_a_killed_command_is_started_again(keep):
    supervisor = keep("-m", "nanodag.worker.respawn", sys.executable, "-c", COMMAND)
    first = int(supervisor.stdout.readline())
    os.kill(first, signal.SIGKILL)
    assert "supervisor: the process ended (-9)" in supervisor.stdout.readline()
    second = int(supervisor.stdout.readline())
    assert second != first and is_running(second)
    os.killpg(supervisor.pid, signal.SIGTERM)
    assert supervisor.wait(60) == 0
    assert not is_running(second)


def test_a_command_that_cannot_start_is_not_started_again(keep):
    supervisor = keep("-m", "nanodag.worker.respawn", sys.executable, "-c", "raise SystemExit(7)")
    assert supervisor.wait(60) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_killed_supervisor_takes_its_command_along(keep):
    supervisor = keep("-m", "nanodag.worker.respawn", sys.executable, "-c", COMMAND)
    pid = int(supervisor.stdout.readline())
    supervisor.kill()
    wait_until(lambda: not is_running(pid))


def test_a_process_that_ends_with_its_parent_does_so_within_seconds(keep):
    parent = keep("-c", PARENT.replace("STDERR", "None"))
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    wait_until(lambda: not is_running(pid))


def test_a_process_whose_output_went_to_its_parent_ends_with_it_too(keep):
    parent = keep("-c", PARENT.replace("STDERR", "subprocess.PIPE"))  # nobody reads it, once the parent is gone
    pid = int(parent.stdout.readline())
    parent.kill()
    wait_until(lambda: not is_running(pid))
