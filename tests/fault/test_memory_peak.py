"""The memory that a stage's processes take together."""

import subprocess
import sys

import pytest

from nanodag.children.tree import MemoryPeak

HOLDS = "held = b'x' * 40_000_000; print('ready', flush=True); input()"
STARTS_ONE = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {HOLDS!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
{HOLDS}
"""


@pytest.fixture
def child_and_grandchild():
    child = subprocess.Popen([sys.executable, "-c", STARTS_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    yield child
    child.communicate(b"\n")


LOOKS = f"""
import subprocess, sys
from nanodag.children.tree import MemoryPeak
from nanodag.children.tree import descendants
child = subprocess.Popen([sys.executable, "-c", {STARTS_ONE!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
memory = MemoryPeak()
memory.look()
print(len(list(descendants(child.pid))), memory.highest)
child.communicate(b"\\n")
"""


def test_the_peak_is_that_of_all_processes_together():
    # In a process of its own: the one of the tests may have other children.
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, check=True)
    num_below, highest = map(int, done.stdout.split())
    assert num_below == 1
    assert 80_000_000 < highest < 200_000_000


def test_a_second_look_a_moment_later_is_left_out(child_and_grandchild, monkeypatch):
    memory = MemoryPeak()
    memory.look()
    monkeypatch.setattr("nanodag.children.tree.descendants", lambda pid: pytest.fail("it looked again"))
    memory.look()
