"""Programs of a model: bounded with bubblewrap and without it."""

import logging
import os
import shutil

import pytest

from nanodag.rl import sandbox
from nanodag.rl.sandbox import run_python

HAS_BUBBLEWRAP = shutil.which("bwrap") is not None


def no_bubblewrap():
    (pytest.fail if os.environ.get("NANODAG_CI") else pytest.skip)("there is no bubblewrap (bwrap) here")


@pytest.fixture(params=["limits only", "bubblewrap"])
def walls(request, monkeypatch):
    """With and without bubblewrap, as far as there is one."""
    sandbox.bubblewrap.cache_clear()
    if request.param == "limits only":
        monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    elif not HAS_BUBBLEWRAP:
        no_bubblewrap()
    yield request.param
    sandbox.bubblewrap.cache_clear()


def test_a_program_reads_and_prints(walls):
    done = run_python("print(int(input()) + 1)", stdin="41\n", timeout_s=20)
    assert (done.stdout, done.returncode, done.timed_out) == ("42\n", 0, False), done


def test_time_memory_and_output_are_bounded(walls):
    assert run_python("while True: pass", timeout_s=1).timed_out
    assert "MemoryError" in run_python("bytearray(1 << 40)", timeout_s=20).stderr
    noisy = run_python("while True: print('x' * 100000)", timeout_s=20)
    assert noisy.returncode != 0 and len(noisy.stdout) <= sandbox.MAX_OUTPUT_BYTES


def test_installed_packages_and_the_environment_are_not_there(walls, monkeypatch):
    monkeypatch.setenv("A_SECRET", "1")
    done = run_python("import os; print('A_SECRET' in os.environ)\nimport numpy", timeout_s=20)
    assert done.stdout == "False\n" and "No module named 'numpy'" in done.stderr


def test_behind_bubblewrap_there_are_no_files_no_network_and_no_other_processes():
    if not HAS_BUBBLEWRAP:
        no_bubblewrap()
    sandbox.bubblewrap.cache_clear()
    program = f"""
import os, socket
print(os.path.exists({os.path.abspath(__file__)!r}), os.path.exists("/etc/passwd"), os.listdir("/tmp"))
print(len([name for name in os.listdir("/proc") if name.isdigit()]) < 4)
try:
    socket.create_connection(("127.0.0.1", 22), timeout=2)
except OSError as error:
    print("no network", error.errno)
open("/usr/written", "w")
"""
    done = run_python(program, timeout_s=20)
    assert done.stdout.startswith("False False []\nTrue\nno network"), done
    assert "Read-only" in done.stderr
    sandbox.bubblewrap.cache_clear()


def test_without_bubblewrap_a_warning_says_what_is_open(monkeypatch, caplog):
    sandbox.bubblewrap.cache_clear()
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert sandbox.bubblewrap() is None
    assert "its files and its network: bubblewrap (bwrap) is not installed" in caplog.text
    sandbox.bubblewrap.cache_clear()
