"""How names, values and numbers are put into messages."""

import difflib
from collections.abc import Iterable
from typing import Any


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


def counted(number: int, noun: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
        shown = ", ".join(said(one) for one in value[:3])
        return f"[{shown}{', ...' if len(value) > 3 else ''}]"
    return f"{value!r:.100}" if isinstance(value, str) else f"{value}"


def duration(seconds: float) -> str:
    """`4.2s`, `3m07s`, `2h05m`; empty for what is not known."""
    if seconds < 0:
        return ""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes = int(seconds) // 60
    return f"{minutes}m{int(seconds) % 60:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def size(num_bytes: float) -> str:
    """`1.2 MB` and the like."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError
