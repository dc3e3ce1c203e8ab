"""Waiting for processes, and which of them still run."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0, every_s: float = 0.02) -> None:
    """Return once the condition holds, asked every_s; AssertionError after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(every_s)


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def alive(pids: Iterable[int]) -> list[int]:
    """Those that still run."""
    return [pid for pid in pids if is_running(pid)]


def pids_in(workspace: Path) -> list[int]:
    """What a fake worker wrote: its own pid and its children's."""
    return [int(line) for line in (workspace / "pids").read_text().split()]
