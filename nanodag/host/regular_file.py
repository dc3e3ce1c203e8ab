"""Regular files of a checkpoint, opened so that nothing else is: a FIFO in its place would be waited for. No torch."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanodag.errors import BadRequest

MAX_TEXT_BYTES = 64 << 20  # of a JSON file that is read whole


@contextmanager
def regular(path: Path) -> Iterator[str]:
    """A name under which a library can open the file, which is a regular one. Raises BadRequest where there is none."""
    try:
        # Without O_NONBLOCK the very opening of a FIFO waits for whoever writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise BadRequest(f"{shortened(path)} cannot be read: {_reason(error)}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadRequest(f"{shortened(path)} is not a regular file")
        name = f"/proc/self/fd/{descriptor}"  # the very file that was looked at, whatever has its name by now
        yield name if os.path.exists(name) else str(path)
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """A regular file's text. Raises BadRequest where there is none, or far too much."""
    with regular(path) as name, open(name, encoding="utf-8") as file:
        try:
            text = file.read(MAX_TEXT_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(f"{shortened(path)} cannot be read: {_reason(error)}") from error
    if len(text) == MAX_TEXT_BYTES:
        raise BadRequest(f"{shortened(path)} has more than {MAX_TEXT_BYTES} bytes")
    return text


def exists(path: Path) -> bool:
    """Whether there is something of that name; also for names that no file system takes."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def shortened(path: Path) -> str:
    """For a message."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:120]}... ({len(text)} characters)"


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
