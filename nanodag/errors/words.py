"""Names, values and numbers in messages."""

import difflib
from collections.abc import Iterable
from typing import Any

from rich import filesize


def nearest(name: str, options: Iterable[str], *, likeness: float = 0.6) -> str:
    """` Did you mean 'x'?` for the option whose last part is most like a name, the outermost of those, or nothing.

    likeness: how like it must be, 1 being equal."""
    inmost_first = sorted(options, key=lambda option: option.count("."), reverse=True)
    by_last = {option.rpartition(".")[2]: option for option in inmost_first}
    near = difflib.get_close_matches(name[:200], by_last, n=1, cutoff=likeness)
    return f" Did you mean {by_last[near[0]]!r}?" if near else ""


def listed(names: Iterable[str]) -> str:
    """`a, b, c`; `none` where there are none."""
    return ", ".join(names) or "none"


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 stage`, `2 stages`. plural: of a noun that takes more than an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def tries(number: int, last: str) -> str:
    """`3 tries, the last 38 s`; empty where the first one was enough."""
    return f"{number} tries, the last {last}" if number > 1 else ""


def said(value: Any) -> str:
    """A config's value as YAML would have it, short."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"a table of {listed(list(map(str, value))[:5])}{', ...' if len(value) > 5 else ''}" if value else "{}"
    if isinstance(value, list | tuple):
        shown = ", ".join(said(item) for item in value[:3])
        return f"[{shown}{', ...' if len(value) > 3 else ''}]"
    return f"{value!r:.100}" if isinstance(value, str) else f"{value}"


def duration(seconds: float) -> str:
    """`0.4 s`, `38 s`, `4 min 10 s`, `2 h 5 min`; empty for what is not known, a negative one."""
    if seconds < 0:
        return ""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(num_bytes: float) -> str:
    """`950 bytes`, `1.2 MB`: powers of 1000."""
    return filesize.decimal(round(num_bytes))
