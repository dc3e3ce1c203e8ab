"""Weighted sums of rewards."""

from collections import Counter
from collections.abc import Mapping, Sequence

from nanodag.rewards.reward import Reward


def weighted_sum(weights: Mapping[str, float], rewards: Sequence[Reward]) -> Reward:
    """The sum of weight * value over named rewards. Each unweighted value is the component of its name, and each
    reward's own components follow it as `name_component`."""
    components: dict[str, float] = {}
    for label, reward in zip(labels(list(weights)), rewards, strict=True):
        components[label] = reward.value
        components |= {f"{label}_{name}": value for name, value in reward.components.items()}
    total = sum(weight * reward.value for weight, reward in zip(weights.values(), rewards, strict=True))
    return Reward(total, components)


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
