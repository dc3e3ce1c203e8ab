"""Whether an RL stage learned anything, from the metrics of its steps. No torch here."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, linear_regression
from typing import Any

from nanodag.evaluation.intervals import student_p

ALIKE_FROM = 0.999
FEWEST_STEPS = 8  # with fewer, the noise of a step's reward is not known well enough to speak of a trend
NOISE = 0.05


def learning_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the records of metrics.jsonl say of a whole stage.

    reward_first, reward_last: ends of the straight line through the steps' rewards; reward_p: of "there is no trend"
    (two-sided, Student's t), left out below FEWEST_STEPS steps. zero_spread_share: mean over the steps.
    """
    steps = [line for line in lines if line.get("event", "step") == "step" and line.get("step", 0) > 0]
    summary: dict[str, float] = {}
    if shares := [float(line["zero_spread_share"]) for line in steps if "zero_spread_share" in line]:
        summary["zero_spread_share"] = fmean(shares)
    pairs = [(float(line["step"]), float(line["reward"])) for line in steps if "reward" in line]
    if len(pairs) < FEWEST_STEPS:
        return summary
    xs, ys = zip(*pairs, strict=True)
    slope, intercept = linear_regression(xs, ys)
    summary |= {"reward_first": intercept + slope * xs[0], "reward_last": intercept + slope * xs[-1]}
    residual = sum((y - intercept - slope * x) ** 2 for x, y in pairs) / (len(pairs) - 2)
    stderr = math.sqrt(residual / sum((x - fmean(xs)) ** 2 for x in xs))
    is_flat = abs(slope) <= 1e-12  # a reward that is the same in every step has neither trend nor noise
    summary["reward_p"] = 1.0 if is_flat else student_p(slope, stderr, len(pairs) - 2) if stderr else 0.0
    return summary


def why_nothing_was_learned(metrics: Mapping[str, Any]) -> list[str]:
    """Reasons to believe that an RL stage learned nothing, from the metrics that it ended with; none, normally."""
    if metrics.get("version", 1) == 0:
        return ["no update of the weights was made."]
    reasons = []
    if metrics.get("zero_spread_share", 0.0) >= ALIKE_FROM:
        reasons.append("the rewards in each group were all alike, so there was nothing to prefer.")
    if "reward_p" in metrics:
        first, last = metrics["reward_first"], metrics["reward_last"]
        if metrics["reward_p"] >= NOISE:
            reasons.append(f"the reward stayed flat, {first:.3g} at first, {last:.3g} at last: no trend beyond noise.")
        elif last < first:
            reasons.append(f"the reward fell, from {first:.3g} at first to {last:.3g} at last.")
    return reasons
