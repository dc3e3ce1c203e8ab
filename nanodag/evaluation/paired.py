"""Comparison of two checkpoints on the same items.

Two checkpoints that answer the same 400 items differ by less noise than two that answer different ones: what counts is
the difference item by item. Records are those of `samples/<benchmark>.jsonl` (nanodag.evaluation). A benchmark made of
several, such as CORE, is a mean over its parts: noise is that within each part, not how unlike the parts are.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import bdtr

from nanodag.errors import SourceError
from nanodag.evaluation.intervals import UNBOUNDED, freedom_of, student, student_p, weighted_mean

FALSE_ALARMS = 0.05  # the chance that a report calls anything better or worse where nothing is

Records = Path | Iterable[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """b minus a. low, high: Student's 95 % interval of this difference alone. num_higher, num_lower: items
    on which b scored higher, lower than a.

    p_value: of "no difference"; McNemar's exact test where every score is 0 or 1, else Student's t of the differences
    item by item. Corrected for how many are looked at (`holm`), it decides what is more than noise.
    """

    num_items: int
    value_a: float
    value_b: float
    difference: float
    stderr: float
    low: float
    high: float
    p_value: float
    num_higher: int
    num_lower: int


def paired(a: Records, b: Records, metric: str) -> PairedDifference:
    """The difference of two checkpoints' scores on one benchmark.

    a, b: records of the same items, in any order. Differences that are all alike have no spread for Student's t; there
    the sign test decides, which is McNemar's. Raises SourceError when the items differ or lack the metric.

    Source: Student, Biometrika 1908; McNemar, Psychometrika 1947.
    """
    first, second = _by_id(a, metric), _by_id(b, metric)
    if first.keys() != second.keys():
        raise SourceError(
            f"Paired comparison needs the same items on both sides: {len(first.keys() - second.keys())} are only in a, "
            f"{len(second.keys() - first.keys())} only in b. Evaluate both with the same source, limit and seed."
        )
    if len(first) < 2:
        raise SourceError(f"A paired comparison needs at least 2 items; found {len(first)}.")
    names = sorted(first)
    scores_a, scores_b = (np.array([side[name].score for name in names]) for side in (first, second))
    weights = np.array([first[name].weight for name in names])
    differences = scores_b - scores_a
    mean = float((weights * differences).sum() / weights.sum())
    parts = _parts([first[name].part for name in names])
    each = [weighted_mean(differences[of], weights[of]) for of in parts]
    shares = [float(weights[of].sum() / weights.sum()) for of in parts]
    variances = [share**2 * variance for share, (_, variance, _) in zip(shares, each, strict=True)]
    stderr = math.sqrt(math.fsum(variances))
    freedom = freedom_of(variances, [degrees for _, _, degrees in each])
    both = np.concatenate([scores_a, scores_b])
    is_share = bool(((both >= 0) & (both <= 1)).all() and (weights == 1).all())
    low, high = student(mean, stderr, freedom, (-1.0, 1.0) if is_share else UNBOUNDED)
    higher, lower = int((differences > 0).sum()), int((differences < 0).sum())
    # McNemar's, two-sided: of the items that changed, each went either way with chance 1/2.
    exact_p = min(1.0, 2 * float(bdtr(min(higher, lower), higher + lower, 0.5)))
    is_exact = stderr <= 1e-9 * abs(mean) or bool(np.isin(both, (0, 1)).all())
    return PairedDifference(
        num_items=len(names),
        value_a=float((weights * scores_a).sum() / weights.sum()),
        value_b=float((weights * scores_b).sum() / weights.sum()),
        difference=mean,
        stderr=stderr,
        low=low,
        high=high,
        p_value=exact_p if is_exact else student_p(mean, stderr, freedom),
        num_higher=higher,
        num_lower=lower,
    )


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of one benchmark. Raises SourceError naming the file, and the line of what is no record."""
    records = []
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogatepass").split("\n")  # as an eval stage writes them
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} cannot be read: {error}.") from error
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, start=1):
        try:
            record = json.loads(line)
            if not (isinstance(record["id"], str) and isinstance(record["scores"], dict)):
                raise TypeError("another type than a text and a table")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SourceError(f"{path}, line {number}: not a record with id and scores ({error}).") from error
        records.append(record)
    return records


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values in order: calling those below alpha real is wrong about any with a chance of at most alpha,
    whether or not they depend on one another.

    Source: Holm, Scandinavian Journal of Statistics 1979.
    """
    order = np.argsort(p_values)
    times = np.arange(len(p_values), 0, -1) * np.asarray(p_values)[order]
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(np.maximum.accumulate(times), 1.0)
    return adjusted.tolist()


class _Item(NamedTuple):
    score: float
    weight: float
    part: str


def _by_id(records: Records, metric: str) -> dict[str, _Item]:
    items: dict[str, _Item] = {}
    times: Counter[str] = Counter()
    for record in read_records(records) if isinstance(records, Path) else records:
        if metric not in record["scores"]:
            raise SourceError(f"Item {record['id']} has no metric {metric!r}; it has {sorted(record['scores'])}.")
        score, weight, part = record["scores"][metric], record.get("weight", 1.0), str(record.get("part", ""))
        if (
            not all(isinstance(number, int | float) and math.isfinite(number) for number in (score, weight))
            or weight <= 0
        ):
            raise SourceError(
                f"Item {record['id']} has {metric} {score!r:.80} of weight {weight!r:.80}; a score is a number."
            )
        name = record["id"]
        times[name] += 1  # rows of lm-eval's own data that are equal have one id
        items[f"{name}\n{times[name]}"] = _Item(float(score), float(weight), part)
    return items


def _parts(names: Sequence[str]) -> list[np.ndarray]:
    """Numbers of the items of each part; all as one where a part of a single item would say nothing of its noise."""
    _, part_of, counts = np.unique(names, return_inverse=True, return_counts=True)
    return [np.arange(len(names))] if counts.min() < 2 else [np.flatnonzero(part_of == n) for n in range(len(counts))]
