"""Runs of a project of fake stages, in this process."""

from typing import Any

from nanodag.run.record import Run, open_run


def opened(*overrides: str, name: str = "r", **options: Any) -> Run:
    """Begin or resume a run of the preset `tiny`."""
    return open_run(name, file="", preset="tiny", overrides=overrides, **options)
