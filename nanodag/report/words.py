"""Numbers as people read them."""

import re
from typing import Any

from nanodag.errors.words import duration, size
from nanodag.host.beside import table_beside

SCALES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(number: float) -> str:
    """`950`, `1.64 M`, `2.1 T`: three digits."""
    for scale, letter in SCALES:
        if abs(number) >= scale:
            return f"{number / scale:.3g} {letter}"
    return f"{number:.3g}"


def is_share(metric: str) -> bool:
    """True for scores between 0 and 1, which are shown in percent."""
    return metric != "bits_per_byte"


def value(number: float, metric: str) -> str:
    """`41.2` (percent), `1.843` (bits a byte)."""
    return f"{100 * number:.1f}" if is_share(metric) else f"{number:.3f}"


def interval(low: float, high: float, metric: str) -> str:
    """`36.4 to 46.1`."""
    return f"{value(low, metric)} to {value(high, metric)}"


def signed(number: float, metric: str) -> str:
    """`+18.3`, `-0.021`, with the typographic minus."""
    text = f"{100 * number:+.1f}" if is_share(metric) else f"{number:+.3f}"
    return text.replace("-", "−")


def signed_interval(low: float, high: float, metric: str) -> str:
    """`−1.2 to +4.6`."""
    return f"{signed(low, metric)} to {signed(high, metric)}"


def points(metric: str) -> str:
    """Unit of a difference: `points` of percent, `bits per byte`."""
    return "points" if is_share(metric) else metric.replace("_", " ")


def probability(p: float) -> str:
    """`0.031`, `< 0.001`; more digits where three would not tell on which side of 0.05 it lies."""
    if p < 0.001:
        return "< 0.001"
    return f"{p:.3f}" if abs(p - 0.05) >= 0.0005 else f"{p:.5f}"


def markdown(text: str) -> str:
    """Text that stays one line of Markdown and one cell of its tables, and is no markup of its own."""
    return " ⏎ ".join(re.sub(r"([\\|`*_\[\]<>#&~$!])", r"\\\1", line.strip()) for line in text.strip().splitlines())


def fenced(text: str) -> str:
    """Text as a block of code, whatever fences it has itself."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


UNITS: dict[str, str] = table_beside(__file__, "units.yaml")


def measured(name: str, number: Any, *, unit: str = "") -> tuple[str, str]:
    """A metric's value and its unit, which follows from its name unless it is given: (`1.64 M`, `tokens`), (`4 min 10
    s`, ``)."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return shown(number), ""
    unit = unit or next((unit for pattern, unit in UNITS.items() if re.search(pattern, name)), "")
    if unit == "time":
        return duration(number), ""
    if unit == "size":
        return size(number), ""
    if unit == "%":
        return f"{100 * number:.1f}", unit
    if unit in ("FLOPs", "tokens"):
        return count(number), unit
    return f"{number:,}" if isinstance(number, int) else f"{number:.4g}", unit


def shown(anything: Any) -> str:
    """A config value in one line."""
    if isinstance(anything, bool):
        return "yes" if anything else "no"
    if isinstance(anything, float):
        return f"{anything:g}"
    if isinstance(anything, int) and abs(anything) >= 10_000:
        return f"{anything:,}"
    if isinstance(anything, dict):
        return ", ".join(f"{key}: {shown(inner)}" for key, inner in anything.items())
    if isinstance(anything, list | tuple):
        return "; ".join(map(shown, anything)) or "none"
    return "none" if anything is None else str(anything)


def shortened(text: str, limit: int = 400) -> str:
    """The text with its middle left out when it is longer than limit characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]} … {text[-limit // 3 :]}"


SPECIAL = re.compile(r"<\|[\w -]{1,40}\|>|</?s>|<(?:bos|eos|pad|unk|start_of_turn|end_of_turn)>")


def spoken(text: str) -> str:
    """A text of a model or a prompt as a person reads it: shortened, without special tokens."""
    return shortened(SPECIAL.sub(" ", text).strip())


# Controls but tab and line end, lone surrogates, and what is invisible or turns the direction of the text around it.
# Joiners of letters (U+200C, U+200D) stay: scripts and emoji are written with them.
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def legible(text: str) -> str:
    """The text with what cannot be seen spelled out, such as `⟨U+001B⟩` for an escape. So a text neither moves a
    terminal's cursor nor turns what stands beside it, and any text can be written as UTF-8."""
    return HIDDEN.sub(lambda hidden: f"⟨U+{ord(hidden[0]):04X}⟩", text)
