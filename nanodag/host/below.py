"""The processes below one, as Linux lists them, and their memory. Standard library only."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> Iterator[int]:
    """The processes below one, as the kernel lists them; none where it does not."""
    waiting = [pid]
    while waiting:
        for child in children_of(waiting.pop()):
            yield child
            waiting.append(child)


def children_of(pid: int) -> list[int]:
    """The children of a process, of all its threads; none where the system does not list them, or it has ended."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def bytes_of(pid: int) -> int:
    """Memory of a process that it does not share with a file or another; 0 when it has ended."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * PAGE_BYTES
