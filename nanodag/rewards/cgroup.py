"""A cgroup of version 2 for the processes of one program: what all of them take together is bounded. No torch here.

It is made beside the one of this process, where this user may do that and the controllers `memory` and `pids` are on:
as root under systemd, and in a delegated slice, such as a desktop session's. Elsewhere (containers as a rule, version
1) there is none, and resource limits of each process hold.
"""

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

log = logging.getLogger(__name__)

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
END_TIMEOUT_S = 1.0
LEFT_AFTER_S = 60.0  # a group that is in use has a process long before


@contextmanager
def group(*, max_bytes: int, max_processes: int) -> Iterator[Callable[[], int] | None]:
    """A group with these bounds, ended and removed in the end: what puts the process that calls it into the group. None
    where none can be made."""
    above = parent()
    try:
        path = None if above is None else _made(above)
    except OSError as error:  # one could be made before: there are too many by now
        log.warning("No cgroup can be made in %s: %s; limits of each process and a watch hold.", above, error)
        path = None
    if path is None:
        yield None
        return
    try:
        for name, value in (("memory.max", max_bytes), ("pids.max", max_processes), ("memory.oom.group", 1)):
            (path / name).write_text(str(value))
        with suppress(OSError):  # where there is no swap
            (path / "memory.swap.max").write_text("0")
        # Who has opened it decides what is allowed, not who writes. One system call: safe between fork and exec.
        with (path / "cgroup.procs").open("wb", buffering=0) as procs:
            yield partial(os.write, procs.fileno(), b"0")
    finally:
        _remove(path)


@cache
def parent() -> Path | None:
    """The cgroup in which those of programs can be made, found by making one."""
    above = candidate(ROOT, MEMBERSHIP.read_text())
    if above is None:
        return None
    try:
        tried = _made(above)
    except OSError:
        return None
    is_whole = all((tried / name).exists() for name in ("memory.max", "pids.max", "cgroup.kill"))
    for path in above.glob("nanodag-*"):  # left, empty, by starters that were killed
        with suppress(OSError):  # it has processes, or is gone
            if time.time() - path.stat().st_mtime > LEFT_AFTER_S:
                path.rmdir()
    # To move a process needs the right to write here, not only below.
    may_move = os.access(above / "cgroup.procs", os.W_OK)
    _remove(tried)
    return above if is_whole and may_move else None


def _made(above: Path) -> Path:
    path = above / f"nanodag-{uuid.uuid4().hex[:12]}"
    path.mkdir()
    return path


def candidate(root: Path, membership: str) -> Path | None:
    """The cgroup above this process's own, where memory and pids are on for its children. root: where version 2 is
    mounted; membership: what MEMBERSHIP holds."""
    location = next((line[3:] for line in membership.splitlines() if line.startswith("0::/")), None)
    if location is None:
        return None
    above = (root / location.lstrip("/")).parent if location != "/" else root
    try:
        on = (above / "cgroup.subtree_control").read_text().split()
    except OSError:
        return None
    return above if {"memory", "pids"} <= set(on) else None


def in_force() -> str:
    """Bound of a program's processes together, in words."""
    folder = parent()
    return f"cgroups in {folder}" if folder else "limits of each process and a watch, as no cgroup can be made"


def _remove(path: Path) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    with suppress(OSError):
        (path / "cgroup.kill").write_text("1")
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:  # another process has swept it
            return
        except OSError as error:
            if time.monotonic() > deadline:
                log.warning("The cgroup %s cannot be removed: %s.", path, error)
                return
            time.sleep(0.002)
