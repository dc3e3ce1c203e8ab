"""Folders for what a process needs while it runs, such as sockets and logs. Standard library only.

A process that is killed cannot remove its own. So each folder is locked by the process that made it, and a process that
makes its first removes those on this machine that nobody holds any more.
"""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

PREFIX = "nanodag-scratch-"
NEW_S = 5.0  # of a folder that has no lock yet


class Scratch(tempfile.TemporaryDirectory[str]):
    """A folder among the temporary files. name: what it is for."""

    def __init__(self, name: str) -> None:
        remove_left(tempfile.gettempdir())
        super().__init__(prefix=f"{PREFIX}{name}-", ignore_cleanup_errors=True)
        self._lock = os.open(self.name, os.O_RDONLY)
        with suppress(OSError):  # NFS and others lock no folders; then nobody can who would remove it
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    @property
    def path(self) -> Path:
        """Where it is."""
        return Path(self.name)

    def cleanup(self) -> None:
        """Remove it now."""
        super().cleanup()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


@cache
def remove_left(place: str) -> None:
    """Remove the folders there whose processes have ended; once in a process."""
    for folder in Path(place).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or another process removes it, too
            if time.time() - folder.stat().st_mtime < NEW_S or folder.is_symlink():
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
