"""The line of a user's own code that an error came from: neither ours, nor Python's, nor an installed package's."""

import os
import sysconfig
import traceback
from pathlib import Path
from types import CodeType

from nanodag.errors import NanodagError

MAX_SAID = 500
OURS = str(Path(__file__).parents[1]) + os.sep  # a checkout may lie in a folder of that name, with all libraries
_NOT_THEIRS = (OURS, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<")


def is_users(file: str) -> bool:
    """True for a file of the user's own code."""
    return not file.startswith(_NOT_THEIRS) and "site-packages" not in file and "dist-packages" not in file


def place(file: str, line: int | str, function: str) -> str:
    return f"{file}, line {line}, in {function}"


def with_place(error: BaseException, function: CodeType | None = None) -> str:
    """`Class: message`, of our errors the message, and the deepest line of the user's own that it passed through, where
    there is one; else where a function of the user's own begins. The message is cut at MAX_SAID characters."""
    is_ours = isinstance(error, NanodagError)  # whose message says all
    text = (str(error) if is_ours else f"{type(error).__name__}: {error}")[:MAX_SAID]
    frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    if function is not None:
        frames.insert(0, (function.co_filename, function.co_firstlineno, function.co_name))
    theirs = [frame for frame in frames if is_users(frame[0])]
    return f"{text} ({place(*theirs[-1])})" if theirs else text
