"""The memory that a stage's processes take together."""

import subprocess
import sys

import pytest

from nanodag.worker.memory_peak import MemoryPeak, descendants

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


def test_the_peak_is_that_of_all_processes_together(child_and_grandchild):
    memory = MemoryPeak()
    memory.look()
    assert len(descendants(child_and_grandchild.pid)) == 1
    assert 80_000_000 < memory.highest < 400_000_000


def test_a_second_look_a_moment_later_is_left_out(child_and_grandchild, monkeypatch):
    memory = MemoryPeak()
    memory.look()
    monkeypatch.setattr("nanodag.worker.memory_peak.descendants", lambda pid: pytest.fail("it looked again"))
    memory.look()
