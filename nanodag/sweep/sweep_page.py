"""Results of the points of a sweep, and their page: one table over all of them, what each option does, and their
curves."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nanodag.config.kind import SCORES
from nanodag.config.kinds import find_kind
from nanodag.errors import SourceError
from nanodag.errors.words import duration
from nanodag.evaluation.paired import FALSE_ALARMS, PairedDifference, holm, paired
from nanodag.nightly.findings import score_cell
from nanodag.report import words
from nanodag.report.gather import ReportedStage
from nanodag.report.page import NOTES, PageSection, Part, Report
from nanodag.report.plots import MAX_LINES, Panel, overlaid
from nanodag.report.tables import Cell, Table
from nanodag.run.record import Run, StageResult
from nanodag.store import Artifact
from nanodag.store.run_record import PointRecord
from nanodag.sweep.sweep_run import Sweep, values_of
from nanodag.worker.tracker import numbers_in

log = logging.getLogger(__name__)

# The metrics of a stage that are worth a column, most telling first; True where higher is better.
TELLING = {"eval_reward": True, "reward": True, "validation_bits_per_byte": False, "validation_loss": False}
MAX_METRICS = 4
LOG_FROM = 20.0  # an option whose largest value is that many times its smallest is drawn over its logarithm


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
    """A point: its stage's artifact, None where it failed, or was ended early: then with the reason; its stage, of the
    first points that did not; scores by `eval: benchmark`."""

    point: PointRecord
    artifact: Artifact | None
    early: str
    stage: ReportedStage | None
    scores: dict[str, PointScore]

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The numbers that the stage ended with."""
        return numbers_in(self.artifact.metrics) if self.artifact is not None else {}


def rows_of(sweep: Sweep, run: Run, results: Mapping[str, StageResult], ended: Mapping[str, str]) -> list[PointRow]:
    """A row a point, in their order. results: stage of the sweep -> its result; what failed is not in it. ended:
    reasons of stages that were ended early."""
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
        drawn = None
        if artifact is not None and len(rows) < MAX_LINES:
            records = run.store.verified(artifact, "records")
            drawn = ReportedStage.read("", {**vars(artifact), "files": "", "records": records})
        early = ended.get(point.stages[sweep.stage], "") if artifact is None else ""
        rows.append(PointRow(point=point, artifact=artifact, early=early, stage=drawn, scores=scores))
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
            **({"early": row.early} if row.early else {}),
            "metrics": row.metrics,
            "scores": {
                label: {**vars(s), "difference": vars(s.difference) if s.difference else None}
                for label, s in row.scores.items()
            },
        }
        for row in rows
    ]


def sweep_report(name: str, sweep: Sweep, rows: Sequence[PointRow], first: Sequence[PageSection] = ()) -> Report:
    """The page. rows: in the points' order. first: sections that come before all others."""
    labels = list(dict.fromkeys(label for row in rows for label in row.scores))
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    differing = [n for n in names if len({row.metrics[n] for row in rows if n in row.metrics}) > 1]
    metrics = [*(n for n in TELLING if n in names), *(n for n in differing if n not in TELLING)][:MAX_METRICS]
    failed = sum(row.artifact is None and not row.early for row in rows)
    early = sum(bool(row.early) for row in rows)
    ends = [f"{count} of them {what}" for count, what in ((early, "ended early"), (failed, "failed")) if count]
    note = NOTES["points"].format(false_alarms=FALSE_ALARMS)
    parts = [Part(table=_table(sweep, rows, labels, metrics))]
    made = [*first, PageSection(title="Points", note=note, parts=parts)]
    if panels := _option_panels(sweep, rows, labels, metrics):
        parts = [Part(panels=panels)]
        made.append(PageSection(title="What the options do", parts=parts, in_markdown=False))
    if panels := overlaid({f"point {row.point.number}": row.stage for row in rows if row.stage is not None}):
        note = f"The first {MAX_LINES} points." if len(rows) > MAX_LINES else ""
        parts = [Part(panels=panels)]
        made.append(PageSection(title="Curves", note=note, parts=parts, in_markdown=False))
    costs = {row.artifact.key: row.artifact.cost for row in rows if row.artifact is not None}  # points may share one
    seconds = sum(float(cost.get("seconds", 0.0)) for cost in costs.values())
    cards = [
        Cell(text=str(len(rows)), detail=", ".join(["points", *ends])),
        Cell(text=duration(seconds), detail=f"of stage {sweep.stage}, all points together"),
        Cell(text=str(len(sweep.pipeline.stages)), detail="stages, those that points share counted once"),
    ]
    return Report(
        title=f"Sweep {name}", subtitle=f"stage {sweep.stage} · {', '.join(sweep.names)}", cards=cards, sections=made
    )


def _table(sweep: Sweep, rows: Sequence[PointRow], labels: Sequence[str], metrics: Sequence[str]) -> Table:
    body, names = [], sweep.names
    for row in sorted(rows, key=lambda row: _rank(row, labels, metrics)):
        values = values_of(row.point)
        options = [Cell(text=values.get(name, "")) for name in names]
        scores = [_score_cell(row.scores.get(label)) for label in labels]
        numbers = [Cell(text=f"{row.metrics[m]:.4g}" if m in row.metrics else "") for m in metrics]
        missing = Cell(text=row.early) if row.early else Cell(text="failed", tone="bad")
        state = Cell(text=row.artifact.key[:8], code=True) if row.artifact else missing
        body.append([Cell(text=str(row.point.number)), *options, *scores, *numbers, state])
    headers = ["point", *sweep.names, *labels, *(metric.replace("_", " ") for metric in metrics), "key"]
    first = 1 + len(sweep.names)
    return Table(headers=headers, rows=body, numeric=tuple(range(first, len(headers))))


def _rank(row: PointRow, labels: Sequence[str], metrics: Sequence[str]) -> tuple[float, int]:
    """Best first by the first score, else by the first metric; what has none last."""
    if labels and (score := row.scores.get(labels[0])) is not None:
        return (-score.value if score.higher_is_better else score.value), row.point.number
    if not labels and metrics and metrics[0] in row.metrics:
        value = row.metrics[metrics[0]]
        return (-value if TELLING.get(metrics[0], False) else value), row.point.number
    return math.inf, row.point.number


def _score_cell(score: PointScore | None) -> Cell:
    if score is None or (outcome := score.difference) is None:
        return score_cell(score)
    interval, tone = words.signed_interval(outcome.low, outcome.high, score.metric), ""
    if score.adjusted < FALSE_ALARMS:
        tone = "good" if (outcome.difference > 0) == score.higher_is_better else "bad"
    detail = f"{words.signed(outcome.difference, score.metric)}, {interval}"
    return Cell(text=words.value(score.value, score.metric), detail=detail, tone=tone)


def _option_panels(
    sweep: Sweep, rows: Sequence[PointRow], labels: Sequence[str], metrics: Sequence[str]
) -> list[Panel]:
    """Each score, or without any each metric, over the option that has most values, a line for each setting of the
    others; over the points' numbers where that would be too many lines, or the option is no number."""
    option = max(sweep.names, key=lambda name: len({values_of(row.point).get(name) for row in rows}))
    places, ticks, x_label = _axis_of(option, rows)
    lines: dict[str, list[PointRow]] = {}
    others = [name for name in sweep.names if name != option]
    for row in rows:
        values = values_of(row.point)
        rest = [f"{name.rpartition('.')[2]} {values.get(name, '')}" for name in others]
        lines.setdefault(", ".join(rest) or option, []).append(row)
    if not places or len(lines) > MAX_LINES:
        places = {row.point.number: float(row.point.number) for row in rows}
        ticks, x_label, lines = [], "point", {"points": list(rows)}
    panels = []
    for name in labels or metrics:
        shown = {row.point.number: _numbers(row, name, is_score=bool(labels)) for row in rows}
        drawn, intervals = {}, {}
        for text, mine in lines.items():
            there = sorted((row.point.number for row in mine if shown[row.point.number]), key=places.__getitem__)
            drawn[text] = ([places[number] for number in there], [shown[number][0] for number in there])
            if labels:
                intervals[text] = ([shown[number][1] for number in there], [shown[number][2] for number in there])
        is_share = labels and any(words.is_share(row.scores[name].metric) for row in rows if name in row.scores)
        title = f"{name} (%)" if is_share else name if labels else name.replace("_", " ")
        panel = Panel(title=title, x_label=x_label, lines=drawn, marked=tuple(drawn), intervals=intervals, ticks=ticks)
        panels.append(panel)
    return [panel for panel in panels if any(xs for xs, _ in panel.lines.values())]


def _numbers(row: PointRow, name: str, *, is_score: bool) -> tuple[float, ...]:
    """A point's score with its interval, in percent where it is a share, or its metric; empty where it has none."""
    if not is_score:
        return (row.metrics[name],) if name in row.metrics else ()
    if (score := row.scores.get(name)) is None:
        return ()
    scale = 100 if words.is_share(score.metric) else 1
    return scale * score.value, scale * score.low, scale * score.high


def _axis_of(option: str, rows: Sequence[PointRow]) -> tuple[dict[int, float], list[tuple[float, str]], str]:
    """Place of each point on an option's axis, the ticks, and the axis's name; nothing where it is no number."""
    try:
        given = {row.point.number: values_of(row.point)[option] for row in rows}
        values = {number: float(text) for number, text in given.items()}
    except (KeyError, ValueError):
        return {}, [], ""
    texts = {values[number]: text for number, text in given.items()}
    is_log = min(texts) > 0 and max(texts) / min(texts) >= LOG_FROM
    place = math.log10 if is_log else float
    step = max(1, -(-len(texts) // 6))
    ticks = [(place(value), texts[value]) for value in sorted(texts)[::step]]
    return {number: place(value) for number, value in values.items()}, ticks, option
