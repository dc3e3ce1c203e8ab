"""Memory of this process, as Linux tells it (0 elsewhere), and its garbage collector. Standard library only."""

import contextlib
import gc
import re
from pathlib import Path

NEW_OBJECTS, YOUNG_ROUNDS, OLD_ROUNDS = 100_000, 20, 100
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes() -> int:
    """The most that it has taken since this was asked last, or since it began where Linux keeps no other count."""
    match = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text() if STATUS.exists() else "", re.MULTILINE)
    with contextlib.suppress(OSError):  # a container may not let it
        CLEAR.write_text("5")
    return int(match[1]) << 10 if match else 0


def collect_rarely() -> None:
    """Look for garbage in cycles less often, for a process that reads large JSON: an answer of 1,000 tokens is as many
    small lists, none of them in a cycle, and Python's default looks at all of them after 700 new objects. Reading then
    takes four times as long."""
    gc.set_threshold(NEW_OBJECTS, YOUNG_ROUNDS, OLD_ROUNDS)
