"""The most memory that the processes below this one ever took together, by looking now and then. Linux only.

Shared pages count by their share (PSS), so ranks that map the same libraries do not count them twice. A peak between
two looks is missed.
"""

import contextlib
import os
import time
from pathlib import Path

from nanodag.host.below import descendants

EVERY_S = 0.5
SHARE_OF_TIME = 0.02
"""At most, that looking may take: of processes of a hundred gigabytes it takes a good part of a second."""


class MemoryPeak:
    """Call `look` as often as there is time. highest: bytes; 0 where /proc does not tell."""

    def __init__(self) -> None:
        self.highest = 0
        self._next = 0.0

    def look(self) -> None:
        """Add up what all descendants take now, unless the last look was a moment ago."""
        began = time.monotonic()
        if began < self._next:
            return
        self.highest = max(self.highest, sum(_size_of(pid) for pid in descendants(os.getpid())))
        took = time.monotonic() - began
        self._next = began + max(EVERY_S, took / SHARE_OF_TIME)


def _size_of(pid: int) -> int:
    """Bytes of a process, shared pages by their share; 0 of one that has ended or is another user's."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0
