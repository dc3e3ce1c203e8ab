"""Waiting for processes, and which of them still run."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil


def wait_until(
    condition: Callable[[], Any], timeout_s: float = 60.0, every_s: float = 0.02, said: Callable[[], str] | None = None
) -> Any:
    """What the condition gives once that is true, asked every_s; AssertionError, with what is said, after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, said() if said else "waited too long"
        time.sleep(every_s)
    return found


def wait_for_step(run: Any, stage: str, step: int, of: str = "r") -> Path:
    """The workspace of a stage that another thread or process runs, once it has written that step's metrics."""
    wait_until(lambda: of in run.store.runs())

    def reached() -> Path | None:
        workspace = run.store.read_run(of).stages[stage].workspace
        path = run.store.local / "work" / (workspace or "none").rpartition("/")[2] / "metrics.jsonl"
        return path.parent if path.exists() and f'"step": {step}' in path.read_text() else None

    return wait_until(reached, 300)


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


def listening(pid: int) -> set[tuple[str, str]]:
    """Every address that a process or what it started listens on, with what it is."""
    found = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            name = " ".join(process.cmdline()[1:4])
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((name, connection.laddr.ip))
        except psutil.Error:  # it has ended
            continue
    return found
