"""Folders of this machine, the checkout and what this user's processes share, and who may have written a file."""

import os
import stat
from contextlib import suppress
from pathlib import Path

PRIVATE = 0o700  # mode of a folder that is made; who owns it may open it to a group
PROJECT = Path(__file__).resolve().parents[2]


def cache_folder() -> Path:
    """Folder that this user's processes share between runs, made when missing; all of it can be deleted."""
    folder = Path(os.environ.get("NANODAG_CACHE") or user_cache())
    with suppress(OSError):  # who writes there meets it, and says what for
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    return folder


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
