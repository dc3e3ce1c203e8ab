"""Statistics of a list of item scores: mean, standard error, 95 % interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit

from nanodag.errors import SourceError

Z95 = 1.959963984540054  # 97.5 % quantile of the normal distribution
_LEAST = 1e-12
UNBOUNDED = (-math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class Score:
    """A benchmark's score. low and high bound the 95 % interval; value lies between them."""

    value: float
    stderr: float
    low: float
    high: float
    num_items: int


def score_of(values: Sequence[float], weights: Sequence[float] | None = None) -> Score:
    """The weighted mean of item scores, with its standard error over items drawn at random.

    values: (N,) one score an item. weights: (N,) positive, 1 each where None (a document's bytes, for bits per byte).
    Right-or-wrong scores get Wilson's interval, which stays within [0, 1] and is not empty at 0 or N right; others
    Student's, cut at 0 and 1 where unweighted scores all lie there. Raises SourceError for fewer than 2 items.

    Source: Student, Biometrika 1908; Wilson, JASA 1927.
    """
    scores = np.asarray(values, dtype=np.float64)
    weight = np.ones_like(scores) if weights is None else np.asarray(weights, dtype=np.float64)
    if len(scores) < 2:
        raise SourceError(
            f"A score needs 2 items or more for its standard error; found {len(scores)}. Raise the limit."
        )
    if not np.isfinite(scores).all() or not (weight > 0).all():
        raise SourceError("An item's score is not a finite number, or its weight is not positive.")
    num = len(scores)
    value, variance, freedom = weighted_mean(scores, weight)
    stderr = math.sqrt(variance)
    is_binary = bool(np.isin(scores, (0.0, 1.0)).all() and (weight == weight[0]).all())
    is_share = weights is None and bool(((scores >= 0) & (scores <= 1)).all())
    low, high = (
        wilson(value, num) if is_binary else student(value, stderr, freedom, (0.0, 1.0) if is_share else UNBOUNDED)
    )
    return Score(value=value, stderr=stderr, low=low, high=high, num_items=num)


def weighted_mean(scores: np.ndarray, weights: np.ndarray) -> tuple[float, float, float]:
    """The mean, its squared standard error and that one's degrees of freedom.

    Equal weights: s^2 / N, as lm-eval's, and N - 1. Else a few heavy items hold most of the mean: they count by their
    leverage, and the degrees by how many items of equal weight would vary as much.

    Source: MacKinnon and White, Journal of Econometrics 1985 (HC2); Kish, Survey Sampling, 8.2.
    """
    shares = weights / weights.sum()
    mean = float((shares * scores).sum())
    variance = ((shares * (scores - mean)) ** 2 / np.maximum(1 - shares, _LEAST)).sum()
    return mean, float(variance), max(1.0, float(1 / (shares**2).sum()) - 1)


def student(
    value: float, stderr: float, freedom: float, bounds: tuple[float, float] = UNBOUNDED
) -> tuple[float, float]:
    """Student's 95 % interval of a mean, cut at the bounds of what the mean can be. freedom: degrees of freedom."""
    half = float(stdtrit(freedom, 0.975)) * stderr
    return max(value - half, bounds[0]), min(value + half, bounds[1])


def student_p(value: float, stderr: float, freedom: float) -> float:
    """Two-sided p-value of "the mean is 0". stderr: above 0."""
    return 2 * float(stdtr(freedom, -abs(value) / stderr))


def freedom_of(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    """Degrees of freedom of a sum of independent means. variances, freedoms: of each.

    Source: Welch, Biometrika 1947 (Welch-Satterthwaite).
    """
    spread = math.fsum(v**2 / freedom for v, freedom in zip(variances, freedoms, strict=True))
    return math.fsum(variances) ** 2 / spread if spread else 1.0


def centred_mean(tasks: Sequence[tuple[float, float, int, float]]) -> Score:
    """The mean of shares, each centred so that guessing is 0 and all right 1; the tasks' errors are independent.

    tasks: value, standard error, number of items and chance of each.
    """
    num = len(tasks)
    value = sum((share - chance) / (1 - chance) for share, _, _, chance in tasks) / num
    least = sum(-chance / (1 - chance) for *_, chance in tasks) / num
    variances = [(stderr / (1 - chance) / num) ** 2 for _, stderr, _, chance in tasks]
    stderr, freedom = math.sqrt(math.fsum(variances)), freedom_of(variances, [items - 1 for _, _, items, _ in tasks])
    low, high = student(value, stderr, freedom, (least, 1.0))
    return Score(value=value, stderr=stderr, low=low, high=high, num_items=sum(items for _, _, items, _ in tasks))


def wilson(share: float, num: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `num` items."""
    shrink = 1 + Z95**2 / num
    centre = (share + Z95**2 / (2 * num)) / shrink
    half = Z95 / shrink * math.sqrt(share * (1 - share) / num + Z95**2 / (4 * num**2))
    # At 0 or all right the bound is exactly 0 or 1; rounding must not push it past the value.
    return min(max(centre - half, 0.0), share), max(min(centre + half, 1.0), share)
