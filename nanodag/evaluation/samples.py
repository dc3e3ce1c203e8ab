"""Metrics over the samples of one item: avg@n, pass@k, maj@n. No torch here."""

import math
from collections import Counter
from collections.abc import Sequence

from nanodag.config.kinds.evaluation import OVER_SAMPLES


def over_samples(metric: str, scores: Sequence[float], parsed: Sequence[str]) -> float:
    """An item's value of `avg@n`, `pass@k` or `maj@n`. scores, parsed: of each of its n samples; parsed is empty where
    no answer could be parsed. Raises ValueError for another name or count."""
    found = OVER_SAMPLES.fullmatch(metric)
    if found is None or not scores:
        raise ValueError(f"{metric!r} is no metric over {len(scores)} samples")
    kind, count = found[1], int(found[2])
    if kind == "pass":
        return pass_at(count, len(scores), sum(score >= 1.0 for score in scores))
    if count != len(scores):
        raise ValueError(f"{metric} of {len(scores)} samples")
    return math.fsum(scores) / count if kind == "avg" else majority(scores, parsed)


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """The chance that one of k samples is right, drawn without putting back from num_samples of which num_right are.

    It is unbiased: its mean over draws of num_samples answers is 1 - (1 - p)^k. Raises ValueError for a k above
    num_samples.

    Source: Chen et al., arXiv:2107.03374, eq. 1.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs {k} samples; there are {num_samples}")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority(scores: Sequence[float], parsed: Sequence[str]) -> float:
    """The score of the answer that most samples gave, as parsed. Samples without one have no vote; without any vote it
    is 0. Answers with equally many votes share: the mean of their scores, as if one of them were drawn.

    Source: self-consistency, Wang et al., arXiv:2203.11171.
    """
    votes = Counter(answer for answer in parsed if answer)
    if not votes:
        return 0.0
    most = max(votes.values())
    leading = {answer for answer, count in votes.items() if count == most}
    # All leading answers have equally many samples, so the mean over samples is the mean over answers.
    return math.fsum(s for s, answer in zip(scores, parsed, strict=True) if answer in leading) / (most * len(leading))
