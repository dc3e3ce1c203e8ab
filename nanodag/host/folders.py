"""Folders of this machine: the checkout, and what this user's processes share."""

import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def cache_folder() -> Path:
    """Folder that this user's processes share between runs; all of it can be deleted."""
    folder = os.environ.get("NANODAG_CACHE")
    return Path(folder) if folder else user_cache()


def user_cache() -> Path:
    """The cache folder where no NANODAG_CACHE names one: environments that were installed stay in it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanodag"


def state_folder() -> Path:
    """Folder of state that this user's programs remember, such as what was typed. It can be deleted."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "nanodag"
