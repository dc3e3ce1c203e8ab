"""Folders of this machine: the checkout, and what this user's processes share."""

import os
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
