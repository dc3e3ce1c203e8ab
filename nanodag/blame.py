"""The line of a user's own code that an error came from: neither ours, nor Python's, nor an installed package's."""

import sysconfig
import traceback
from pathlib import Path

_OURS = str(Path(__file__).parent)
_NOT_THEIRS = (_OURS, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<")


def is_users(file: str) -> bool:
    """True for a file of the user's own code."""
    return not file.startswith(_NOT_THEIRS) and "site-packages" not in file and "dist-packages" not in file


def place(file: str, line: int | str, function: str) -> str:
    return f"{file}, line {line}, in {function}"


def with_place(error: BaseException) -> str:
    """`Class: message`, and the deepest line of the user's own that it passed through, where there is one."""
    text = f"{type(error).__name__}: {error}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{text} ({place(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name)})" if frames else text
