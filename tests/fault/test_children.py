"""Child processes: asked and ended, their memory, and that what they start ends with them."""

import os
import signal
import subprocess
import sys

import pytest

from nanodag.children.child import start_child
from nanodag.children.tree import KILL
from tests.fault.processes import is_running, wait_until

ECHO = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); [s.sendall(said) for said in s.makefile('rb')]"
LEAVES = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"


def test_a_child_is_asked_in_lines_until_it_is_late_or_gone():
    with start_child([sys.executable, "-c", ECHO], has_line=True) as child:
        assert child.ask({"a": [1]}, 60) == {"a": [1]}
        with pytest.raises(TimeoutError):
            child.line.hear(0.05)
        child.send(signal.SIGKILL)
        with pytest.raises(ConnectionError):
            child.ask(1, 60)
        assert child.how_ended() == "was ended by SIGKILL" and not child.is_alive


def test_what_a_child_leaves_in_its_session_ends_when_its_code_is_fetched(tmp_path):
    child = start_child([sys.executable, "-c", LEAVES], log_path=tmp_path / "log")
    assert child.wait(60)
    left = int(child.tail())
    assert is_running(left) and child.code == 0
    wait_until(lambda: not is_running(left))


@pytest.mark.parametrize(("end", "how"), [("stop", "was ended by SIGTERM"), ("hang_up", "ended with code 0")])
def test_a_child_may_end_by_itself_before_it_is_killed(end, how):
    with start_child([sys.executable, "-c", ECHO], has_line=True) as child:
        assert child.ask(1, 60) == 1
        getattr(child, end)(60)
        assert child.how_ended() == how


HOLD_TWICE = "import os, sys; os.fork(); held = b'x' * 40_000_000; print('ready', flush=True); sys.stdin.read()"
LOOKS = f"""
import subprocess, sys
from nanodag.children.tree import MemoryPeak, descendants
child = subprocess.Popen([sys.executable, "-c", {HOLD_TWICE!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
ready = child.stdout.readline(), child.stdout.readline()
memory = MemoryPeak()
memory.look()
print(len(list(descendants(child.pid))), memory.highest)
child.communicate()
"""


def test_the_peak_is_that_of_all_processes_together():
    # In a process of its own: the one of the tests may have other children.
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, check=True)
    num_below, highest = map(int, done.stdout.split())
    assert num_below == 1
    assert 80_000_000 < highest < 200_000_000


@pytest.fixture
def keep(ended):
    """Start Python in a group of its own; returns the process, and the process ids on its first line."""

    def start(*arguments):
        how = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        process = subprocess.Popen([sys.executable, *arguments], **how)
        ended.append(process)
        return process, [int(pid) for pid in process.stdout.readline().split()]

    return start


PROGRAM = """
import os, subprocess, sys, time
from nanodag.children.tree import keep
keep(os.getppid())
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
"""
STARTER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("end", "signum", "code"),
    [
        ("os._exit(3)", 0, 3),
        ("os.kill(os.getpid(), 11)", 0, -11),
        ("time.sleep(600)", signal.SIGTERM, -signal.SIGTERM),
        ("time.sleep(600)", KILL, -signal.SIGKILL),
    ],
)
def test_a_reaper_ends_as_its_program_does_and_ends_what_that_has_left(keep, end, signum, code):
    reaper, pids = keep("-c", PROGRAM + end)
    if signum:
        reaper.send_signal(signum)
    assert reaper.wait(60) == code and len(pids) == 2
    assert not [pid for pid in pids if is_running(pid)]


# The program speaks before its reaper has handlers for signals.
EARLY = """
import signal, time
real = signal.signal
def late(number, handler):
    time.sleep(0.1)
    return real(number, handler)
signal.signal = late
"""


def test_a_reaper_that_is_told_to_kill_before_it_is_ready_kills_its_program(keep):
    reaper, pids = keep("-c", EARLY + PROGRAM + "time.sleep(600)")
    reaper.send_signal(KILL)
    assert reaper.wait(60) == -signal.SIGKILL
    assert not [pid for pid in pids if is_running(pid)]


def test_a_program_and_all_that_it_has_started_end_with_the_parent_of_its_reaper(keep):
    parent, pids = keep("-c", STARTER, PROGRAM + "time.sleep(600)")
    os.killpg(parent.pid, signal.SIGKILL)
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))


COMMAND = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
PARENT = """
import subprocess, sys, time
code = "import os, time; from nanodag.children.tree import end_with_parent; end_with_parent(os.getppid())"
code += "; print(os.getpid(), flush=True)"
subprocess.Popen([sys.executable, "-c", code + "; time.sleep(600)"], stderr=STDERR)
time.sleep(600)
"""


def test_a_killed_command_is_started_again(keep):
    supervisor, [first] = keep("-m", "nanodag.worker.respawn", sys.executable, "-c", COMMAND)
    os.kill(first, signal.SIGKILL)
    assert "supervisor: the process ended (-9)" in supervisor.stdout.readline()
    second = int(supervisor.stdout.readline())
    assert second != first and is_running(second)
    os.killpg(supervisor.pid, signal.SIGTERM)
    assert supervisor.wait(60) == 0
    assert not is_running(second)


def test_a_command_that_cannot_start_is_not_started_again(keep):
    supervisor, _ = keep("-m", "nanodag.worker.respawn", sys.executable, "-c", "raise SystemExit(7)")
    assert supervisor.wait(60) == 7


def test_a_killed_supervisor_takes_its_command_along(keep):
    supervisor, [pid] = keep("-m", "nanodag.worker.respawn", sys.executable, "-c", COMMAND)
    supervisor.kill()
    wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize("stderr", ["None", "subprocess.PIPE"])  # which nobody reads, once the parent is gone
def test_a_process_that_ends_with_its_parent_does_so_within_seconds(keep, stderr):
    parent, [pid] = keep("-c", PARENT.replace("STDERR", stderr))
    assert is_running(pid)
    parent.kill()
    wait_until(lambda: not is_running(pid))
