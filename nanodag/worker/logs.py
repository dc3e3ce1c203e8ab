"""Logs of worker processes: how they are written, read as they grow, and which lines are for people.

Everything stands in worker.log. What libraries say below an error (progress, advice to their own callers, warnings of
what they deprecate) is no news of the run, so it is shown nowhere else.
"""

import importlib.util
import logging
import os
import re
import sys
import sysconfig
import warnings
from functools import lru_cache
from pathlib import Path

from nanodag.own_code import user_frame

OURS = ("nanodag", "__main__")
# As `set_up` writes them.
LINE = re.compile(r"\d\d:\d\d:\d\d (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<text>(?P<logger>[\w.]+): .*)")
_WARNING = re.compile(r"(?P<path>\S.*?):\d+: \w*Warning: ")
# DeepSpeed, and torch's native logger, write lines of their own.
_FOREIGN = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d+\] \[(DEBUG|INFO|WARNING)\] |[IW]\d{4} \d\d:\d\d:\d\d")


def set_up() -> None:
    """Write this process's log to stderr, warnings as one line each. Of several ranks the first speaks for all: from
    the others come errors alone."""
    is_first = os.environ.get("RANK", "0") == "0"
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO if is_first else logging.ERROR, format=form, datefmt="%H:%M:%S")
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, category, filename, lineno, line=None: (
        f"{filename}:{lineno}: {category.__name__}: {' '.join(str(message).split())}"
    )
    for noisy in ("httpx", "httpcore", "urllib3", "matplotlib", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class ForPeople:
    """Tells, line after line of a worker's log, whether it is shown where people look."""

    def __init__(self) -> None:
        self._goes_on = False  # a warning's second line, the source that it is about, is indented

    def __call__(self, line: str) -> bool:
        if self._goes_on and line.startswith("  "):
            self._goes_on = False
            return False
        self._goes_on = False
        if match := LINE.fullmatch(line):
            if match["logger"] == "py.warnings":
                warning = _WARNING.match(match["text"].removeprefix("py.warnings: "))
                return warning is None or not _is_of_a_library(warning["path"])
            return match["level"] in ("ERROR", "CRITICAL") or not _is_library(match["logger"].partition(".")[0])
        if match := _WARNING.match(line):
            self._goes_on = _is_of_a_library(match["path"])
            return not self._goes_on
        return not _FOREIGN.match(line)


def _is_of_a_library(path: str) -> bool:
    inside = "/site-packages/" in path or "/dist-packages/" in path or path.startswith(("<frozen", "<string>"))
    return (inside or path.startswith(sysconfig.get_path("stdlib"))) and not path.startswith(user_frame.OURS)


@lru_cache
def _is_library(name: str) -> bool:
    """True for the name of an installed module, or one that differs from it in case; a user's own lie elsewhere."""
    if name in OURS:
        return False
    for module in dict.fromkeys((name, name.lower())):
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            continue
        if spec is not None:
            return module in sys.stdlib_module_names or _is_of_a_library(spec.origin or "")
    return False


class Tail:
    """New whole lines of a growing file. from_now: what it has already is left out."""

    def __init__(self, path: Path, *, from_now: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_now and path.exists() else 0

    def lines(self) -> list[str]:
        """Lines written since the last call."""
        if not self._path.exists():
            return []
        if self._path.stat().st_size < self._offset:  # rewritten by a worker that went back to a checkpoint
            self._offset = 0
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            block = stream.read()
        whole, _, _ = block.rpartition(b"\n")
        if not whole:
            return []
        self._offset += len(whole) + 1
        return whole.decode(errors="replace").split("\n")
