"""Folders of this machine: the checkout or its files in a wheel, what this user's processes share, who may have written
a file, and scratch folders for what a process needs while it runs, such as sockets and logs. Standard library only.

A process that is killed cannot remove its own. So each scratch folder is locked by the process that made it, and a
process that makes its first removes those on this machine that nobody holds any more.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path

PRIVATE = 0o700  # mode of a folder that is made; who owns it may open it to a group
PACKAGE = Path(__file__).resolve().parents[1]
PROJECT = PACKAGE / "shipped" if (PACKAGE / "shipped").is_dir() else PACKAGE.parent  # setup.py makes the former
ABOVE = "nanodag.shipped." if PROJECT.parent == PACKAGE else ""  # before the names of flows and tasks as modules
PREFIX = "nanodag-scratch-"
NEW_S = 5.0  # of a folder that has no lock yet


def cache_folder() -> Path:
    """Folder that this user's processes share between runs, made when missing; all of it can be deleted."""
    folder = Path(os.environ.get("NANODAG_CACHE") or user_cache())
    with suppress(OSError):  # who writes there meets it, and says what for
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    return folder


def pipeline_file(file: str) -> Path:
    """The pipeline file that was named; else NANODAG_FILE's, the working directory's, the one nanodag comes with."""
    if file or (file := os.environ.get("NANODAG_FILE", "")):
        return Path(file).absolute()
    here = Path("pipeline.yaml").absolute()
    return here if here.exists() else PROJECT / "pipeline.yaml"


def user_cache() -> Path:
    """The cache folder where no NANODAG_CACHE names one: environments that were installed stay in it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanodag"


def state_folder() -> Path:
    """Folder of state that this user's programs remember, such as what was typed. It can be deleted."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "nanodag"


def may_be_of_others(status: os.stat_result) -> bool:
    """True where a user other than this one and root may have written. A link's own mode says nothing: it is always
    writable by everybody."""
    may_all_write = bool(status.st_mode & stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode)
    return status.st_uid not in (os.geteuid(), 0) or may_all_write


class Scratch:
    """A folder among the temporary files, removed when it is left, dropped, or the process ends. name: what it is for.

    A fork of the process may drop it too: it stays, and stays locked, until its maker is done with it."""

    def __init__(self, name: str) -> None:
        remove_left(tempfile.gettempdir())
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-"))
        lock = os.open(self.path, os.O_RDONLY)
        with suppress(OSError):  # NFS and others lock no folders; then nobody can who would remove it
            fcntl.flock(lock, fcntl.LOCK_EX)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def cleanup(self) -> None:
        self._end()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *raised: object) -> None:
        self.cleanup()


def _remove(path: Path, lock: int, maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


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
