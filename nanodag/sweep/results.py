"""Results of each point of a sweep: the metrics of its stage, the scores of its evals with their intervals."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nanodag.config.kind import SCORES
from nanodag.config.kinds import find_kind
from nanodag.errors import SourceError
from nanodag.evaluation.paired import PairedDifference, holm, paired
from nanodag.report.gather import curve_of, metrics_in
from nanodag.run.record import Run, StageResult
from nanodag.store import Artifact
from nanodag.store.run_record import PointRecord
from nanodag.sweep.points import Sweep
from nanodag.worker.tracker import numbers_in

log = logging.getLogger(__name__)

MAX_CURVES = 6  # as many as there are colours


@dataclass(frozen=True, kw_only=True)
class PointScore:
    """One benchmark's score of one point, and the difference to the first point that has it, on the same items.
    adjusted: its p-value, by Holm's correction over all differences of the sweep."""

    benchmark: str
    metric: str
    higher_is_better: bool
    value: float
    low: float
    high: float
    num_items: int
    difference: PairedDifference | None
    adjusted: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PointRow:
    """A point: its stage's artifact, None where it failed; its records, of the first points that did not; scores by
    `eval: benchmark`."""

    point: PointRecord
    artifact: Artifact | None
    records: Path | None
    scores: dict[str, PointScore]

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The numbers that the stage ended with."""
        return numbers_in(self.artifact.metrics) if self.artifact is not None else {}

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of one metric over training."""
        return curve_of(metrics_in(self.records), name) if self.records is not None else ([], [])


def rows_of(sweep: Sweep, run: Run, results: Mapping[str, StageResult]) -> list[PointRow]:
    """A row a point, in their order. results: stage of the sweep -> its result; what failed is not in it."""
    rows: list[PointRow] = []
    first: dict[str, Path] = {}
    for point in sweep.points:
        result = results.get(point.stages[sweep.stage])
        artifact = run.store.attempt(result.key, result.attempt) if result is not None else None
        scores: dict[str, PointScore] = {}
        for name, stage in point.stages.items():
            if stage in results and find_kind(run.pipeline.stages[stage].kind).makes == SCORES:
                folder = run.store.materialize(run.store.attempt(results[stage].key, results[stage].attempt))
                scores |= _scores(name, folder, first)
        records = run.store.records(artifact) if artifact is not None and len(rows) < MAX_CURVES else None
        rows.append(PointRow(point=point, artifact=artifact, records=records, scores=scores))
    tested = [(row.scores, label, s.difference) for row in rows for label, s in row.scores.items() if s.difference]
    for (scores, label, _), p in zip(tested, holm([difference.p_value for *_, difference in tested]), strict=True):
        scores[label] = replace(scores[label], adjusted=p)
    return rows


def _scores(name: str, folder: Path, first: dict[str, Path]) -> dict[str, PointScore]:
    """first: benchmark -> samples of the first point that has it; added to."""
    scores = {}
    benchmarks = json.loads((folder / "results.json").read_text(encoding="utf-8"))["benchmarks"]
    for benchmark, values in benchmarks.items():
        label = f"{name}: {benchmark}"
        samples = folder / "samples" / f"{benchmark}.jsonl"
        base = first.setdefault(label, samples)
        kept = {k: values[k] for k in ("metric", "higher_is_better", "value", "low", "high", "num_items")}
        difference = _difference(base, samples, values["metric"]) if base != samples else None
        scores[label] = PointScore(benchmark=benchmark, difference=difference, **kept)
    return scores


def _difference(base: Path, samples: Path, metric: str) -> PairedDifference | None:
    try:
        return paired(base, samples, metric)
    except SourceError as error:  # the points differ in what they were asked
        log.warning("No comparison with the first point: %s", error)
        return None


def as_json(rows: list[PointRow]) -> list[dict[str, Any]]:
    return [
        {
            "number": row.point.number,
            "overrides": list(row.point.overrides),
            "key": row.artifact.key if row.artifact is not None else "",
            "attempt": row.artifact.attempt if row.artifact is not None else "",
            "metrics": row.metrics,
            "scores": {
                label: {**vars(s), "difference": s.difference.as_json() if s.difference else None}
                for label, s in row.scores.items()
            },
        }
        for row in rows
    ]
