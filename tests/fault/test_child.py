"""A child answers in time, says how it ended, and its session ends with it."""

import signal
import sys

import pytest

from nanodag.children.child import start_child
from tests.fault.processes import is_running, wait_until

ECHO = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); [s.sendall(said) for said in s.makefile('rb')]"
LEAVES = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"


def test_a_child_is_asked_in_lines_until_it_is_late_or_gone():
    with start_child([sys.executable, "-c", ECHO], has_line=True) as child:
        assert child.ask({"a": [1]}, 60) == {"a": [1]}
        with pytest.raises(TimeoutError):
            child.hear(0.05)
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
