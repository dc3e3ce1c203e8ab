"""The result of a reward function, weighted sums of results, and the parsing that several rewards share."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Literal

_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?")
MAX_NUMBER_CHARACTERS = 64
LARGEST = 1e9  # training computes in float32, where the square of what is above 1e19 is infinite


@dataclass(frozen=True, slots=True)
class Reward:
    """value: what is trained on. components: named parts, each logged by itself. steps: of a process reward
    (nanodag.rewards.function_rewards): the end of each step, in characters of the completion, and its score. parsed:
    the answer that was found in the completion, in a form in which equal answers are equal strings; empty where there
    is none; None where the reward does not say."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    steps: Sequence[tuple[int, float]] | None = None
    parsed: str | None = None

    def __post_init__(self) -> None:
        of_steps = {f"step that ends at {end}": score for end, score in self.steps or ()}
        for name, number in {"value": self.value, **self.components, **of_steps}.items():
            if not abs(number) <= LARGEST:  # NaN neither
                raise ValueError(f"the reward's {name} is {number}; it must be finite, and at most {LARGEST:g} in size")


def as_reward(result: Any) -> Reward:
    """A reward function's result: a Reward, or a number. Raises TypeError, ValueError for anything else."""
    return result if isinstance(result, Reward) else Reward(float(result))


def right_or_wrong(is_right: bool, parsed: str | None = None) -> Reward:
    """1 for right, 0 for wrong. parsed: as Reward's."""
    return Reward(1.0 if is_right else 0.0, parsed=parsed)


def plain_number(text: str) -> Fraction | None:
    """The number that the whole text spells, or None: `1,234`, `$72`, `-3.50`, `20%`, `7.`, with blanks around it. Only
    ASCII digits; no exponent, no infinity, no second number, nothing else beside it."""
    bare = text.strip().removeprefix("$").removesuffix("%").strip()
    if len(bare) > MAX_NUMBER_CHARACTERS or not any(c in "0123456789" for c in bare) or not _NUMBER.fullmatch(bare):
        return None
    try:
        return Fraction(Decimal(bare.replace(",", "")))
    except InvalidOperation:
        return None


def combined(weights: Mapping[str, float], rewards: Sequence[Reward], how: Literal["sum", "min"] = "sum") -> Reward:
    """The sum, or the least, of weight * value over named rewards whose weight is not 0. Each unweighted value is the
    component of its name, and each reward's own components follow it as `name_component`."""
    components: dict[str, float] = {}
    for label, reward in zip(labels(list(weights)), rewards, strict=True):
        components[label] = reward.value
        components |= {f"{label}_{name}": value for name, value in reward.components.items()}
    parts = [weight * reward.value for weight, reward in zip(weights.values(), rewards, strict=True) if weight]
    return Reward(min(parts, default=0.0) if how == "min" else sum(parts), components)


def labels(names: Sequence[str]) -> list[str]:
    """A short word for each: its function for an import path, `remote` and `model` for those; `_2` for a second one."""
    seen: Counter[str] = Counter()
    short_names = []
    for name in names:
        path = name.removeprefix("group:")
        prefix, _, function = path.partition(":")
        short = function if function.isidentifier() and ("." in prefix or path != name) else prefix
        seen[short] += 1
        short_names.append(short if seen[short] == 1 else f"{short}_{seen[short]}")
    return short_names
