"""Results of a night, kept in the store and in the night's record: its scores, which of them got worse, and the trend
page, with a line a model and benchmark over nights. Scores are compared with the last night's and the best ones, by
paired tests on the same items.

Many tests a night find something by chance, so their p-values are corrected (Holm): on a night on which nothing is
worse, the chance that anything is called worse stays below `nightly.false_alarms`. The best of K earlier models is the
luckiest of K on these items, so its p-value counts K times. The tests are one-sided: only worse counts.

They tell this model from that one on the benchmark's items. How far another seed of the same training would have come
out they do not know.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from nanodag.config.nightly import zone_of
from nanodag.errors import ArtifactNotFound, CorruptArtifact, SourceError
from nanodag.errors.words import counted
from nanodag.evaluation.paired import PairedDifference, holm, paired
from nanodag.nightly.nights import Night, earlier_nights
from nanodag.report import words
from nanodag.report.page import NOTES, PageSection, Part, Report, to_html, to_markdown
from nanodag.report.plots import Panel, score_panel
from nanodag.report.tables import Cell, Table, cells
from nanodag.run.derived_runs import note_page, publish_page
from nanodag.run.record import StageResult
from nanodag.store import Store
from nanodag.store.run_record import NightScore, RunRecord

PAGE_STAGE = "trend"
# What must agree for two scores to be of the same benchmark, asked the same way; the items are checked one by one.
SAME = ("label", "stage", "eval", "benchmark", "metric", "form", "chat", "num_fewshot", "sampling")
SAME_ANSWERS = "the same answers to the same items"
MAX_TICKS = 5
UNCHANGED = "unchanged"


@dataclass(frozen=True, kw_only=True)
class NightComparison:
    """A night's score against an earlier one. against: `last night` or `best`; night, run: of the earlier one.

    found: None where nothing was tested, and why says so. candidates: how many earlier models the other was chosen
    from. p_worse: one-sided, times candidates; adjusted: Holm's. is_worse: by more than noise.
    """

    score: NightScore
    against: str
    night: str
    run: str
    found: PairedDifference | None = None
    why: str = ""
    candidates: int = 1
    p_worse: float = 1.0
    adjusted: float = 1.0
    is_worse: bool = False

    def as_json(self) -> dict[str, Any]:
        name = {field: getattr(self.score, field) for field in ("label", "stage", "eval", "benchmark", "metric")}
        rest = {field: value for field, value in vars(self).items() if field not in ("score", "found")}
        return {**name, **rest, "found": vars(self.found) if self.found else None}

    def __str__(self) -> str:
        """`newest/sft sort exact_match 41.2 %, 43.0 % before: −1.8 points (−2.9 to −0.7, adjusted p 0.001) against
        last night (nightly-3)`. The interval is the difference's, of 95 %. Numbers are the page's."""
        lead = f"{line_name(self.score.label, self.score.stage)} {self.score.benchmark} {self.score.metric}"
        if self.found is None:
            return f"{lead}: {self.why}"
        metric, delta = self.score.metric, self.found
        unit = " %" if words.is_share(metric) else ""
        now, before = (f"{words.value(value, metric)}{unit}" for value in (delta.value_b, delta.value_a))
        return (
            f"{lead} {now}, {before} before: {words.signed(delta.difference, metric)} {words.points(metric)} "
            f"({words.signed_interval(delta.low, delta.high, metric)}, adjusted p {words.probability(self.adjusted)}) "
            f"against {self.against} ({self.night})"
        )


def line_name(label: str, stage: str) -> str:
    """`newest/sft`; the label alone for a pinned model."""
    return f"{label}/{stage}" if stage else label


def compare(
    store: Store, scores: Sequence[NightScore], earlier: Sequence[RunRecord], *, false_alarms: float
) -> list[NightComparison]:
    """Each score of tonight against last night's and the best's; what is worse by more than noise is marked.

    scores: of nanodag.nightly.findings.scores_of. earlier: records of earlier nights, oldest first. A score whose model
    and items are the last night's is not tested again.
    """
    made = [comparison for score in scores for comparison in _of_one(store, score, earlier)]
    tested = [i for i, comparison in enumerate(made) if comparison.found is not None]
    for i, adjusted in zip(tested, holm([made[i].p_worse for i in tested]), strict=True):
        made[i] = replace(made[i], adjusted=adjusted, is_worse=adjusted < false_alarms)
    return made


def _of_one(store: Store, score: NightScore, earlier: Sequence[RunRecord]) -> list[NightComparison]:
    """A score against last night's, and against the best where that is another artifact."""
    key = [getattr(score, field) for field in SAME]
    series = [
        (night.run, old)
        for night in earlier
        for old in night.night.scores
        if [getattr(old, field) for field in SAME] == key
    ]
    if not series:
        return []
    last_night, last = series[-1]
    if last.digest == score.digest:
        run = last.run
        return [NightComparison(score=score, against="last night", night=last_night, run=run, why=SAME_ANSWERS)]
    sign = 1 if score.higher_is_better else -1
    best_night, best = max(series, key=lambda pair: sign * pair[1].value)
    candidates = len({old.digest for _, old in series})
    made = [_tested(store, score, "last night", last_night, last, 1)]
    if best.digest not in (last.digest, score.digest):
        made.append(_tested(store, score, "best", best_night, best, candidates))
    return made


def _tested(
    store: Store, score: NightScore, against: str, night: str, old: NightScore, candidates: int
) -> NightComparison:
    comparison = NightComparison(score=score, against=against, night=night, run=old.run)
    try:
        name = f"samples/{score.benchmark}.jsonl"
        before, now = (store.materialize(store.attempt(s.key, s.attempt)) / name for s in (old, score))
        outcome = paired(before, now, score.metric)
    except (ArtifactNotFound, CorruptArtifact, SourceError) as error:
        return replace(comparison, why=str(error))
    is_lower = (outcome.difference < 0) == score.higher_is_better and outcome.difference != 0
    # Half of the two-sided p-value, exact for McNemar's test; where it got better, 1 errs on the safe side.
    p_worse = min(1.0, candidates * outcome.p_value / 2) if is_lower else 1.0
    return replace(comparison, found=outcome, candidates=candidates, p_worse=p_worse)


@dataclass(frozen=True, kw_only=True)
class NightFindings:
    """Findings of a night. worse: a line for each score that is worse by more than noise. page: trend.html; markdown:
    its tables."""

    night: str
    num_scores: int
    worse: tuple[str, ...]
    page: Path
    markdown: str

    def as_json(self) -> dict[str, Any]:
        text = "\n".join(
            [f"nanodag {self.night}: {len(self.worse)} of {counted(self.num_scores, 'score')} got worse", *self.worse]
        )
        return {"night": self.night, "num_scores": self.num_scores, "worse": list(self.worse), "text": text}


def scores_of(night: Night, results: Mapping[str, StageResult]) -> list[NightScore]:
    """One score a model and benchmark, in the order of the config. results: the night's stage name -> its result;
    stages that failed are not in it."""
    scores = []
    evaluated = [(s, name, of) for s in night.subjects for name, (of, _) in s.evals.items() if name in results]
    for subject, name, eval_name in evaluated:
        result = results[name]
        folder = night.run.store.materialize(night.run.store.attempt(result.key, result.attempt))
        benchmarks = json.loads((folder / "results.json").read_text(encoding="utf-8"))["benchmarks"]
        for benchmark, values in benchmarks.items():
            line = {"label": subject.label, "stage": subject.stage, "eval": eval_name, "benchmark": benchmark}
            artifact = {"key": result.key, "attempt": result.attempt, "digest": result.digest}
            kept: dict[str, Any] = {field: values[field] for field in NightScore.model_fields if field in values}
            kept |= line | artifact | {"run": subject.run, "was_found": result.was_found}
            scores.append(NightScore(**kept))
    return scores


def conclude(night: Night, results: Mapping[str, StageResult]) -> NightFindings:
    """Compare a night with those before it and publish its page. results: of its eval stages that succeeded.

    A night concluded again, after a Retry, has its scores replaced and its page added as another attempt.
    """
    store, settings = night.run.store, night.settings.nightly
    scores = scores_of(night, results)
    earlier = earlier_nights(store, night.run.name, settings.compare_nights)
    comparisons = compare(store, scores, earlier, false_alarms=settings.false_alarms)
    record = store.change_run(
        night.run.name, lambda record: record.changed(nightly=record.night.changed(scores=tuple(scores)))
    )
    worse = tuple(str(comparison) for comparison in comparisons if comparison.is_worse)
    if not scores:  # every eval failed: there is nothing to draw
        return NightFindings(night=night.run.name, num_scores=0, worse=(), page=Path(), markdown="")

    zone = zone_of(settings.timezone)
    report = trend_report([*earlier, record], comparisons, false_alarms=settings.false_alarms, zone=zone)
    markdown = to_markdown(report)
    payload = {
        "scores": [score.model_dump(mode="json") for score in scores],
        "comparisons": [comparison.as_json() for comparison in comparisons],
    }
    files = {"trend.html": to_html(report), "trend.md": markdown, "night.json": json.dumps(payload, indent=1)}
    metrics = {"num_scores": len(scores), "num_worse": len(worse)}
    artifact = publish_page(night.run, PAGE_STAGE, {"night": night.run.name}, results, files, metrics)
    note_page(night.run, PAGE_STAGE, artifact)
    page = store.materialize(artifact) / "trend.html"
    return NightFindings(night=night.run.name, num_scores=len(scores), worse=worse, page=page, markdown=markdown)


def trend_report(
    nights: Sequence[RunRecord], comparisons: Sequence[NightComparison], *, false_alarms: float, zone: str
) -> Report:
    """The page of the last of these nights. nights: records with scores, oldest first; comparisons: of the last one."""
    tonight = nights[-1]
    scores, missing, stale = tonight.night.scores, tonight.night.missing, tonight.night.stale
    worse = [comparison for comparison in comparisons if comparison.is_worse]
    note = NOTES["tonight"].format(false_alarms=false_alarms)
    sections = [PageSection(title="Tonight", note=note, parts=_tonight(scores, comparisons))]
    for title, what, texts, tone in (("Not evaluated", "what", missing, ""), ("Stale", "model", stale, "bad")):
        if texts:
            table = Table(headers=[f"{what}, and why"], rows=[[Cell(text=text, tone=tone)] for text in texts])
            sections.append(PageSection(title=title, parts=[Part(table=table)]))
    for label, stage in dict.fromkeys((score.label, score.stage) for score in scores):
        sections.append(_trend_section(nights, label, stage, zone=zone))
    cards = [
        Cell(text=str(len(worse)), detail="scores worse by more than noise", tone="bad" if worse else ""),
        Cell(text=str(len(scores)), detail=f"scores of {counted(len({(s.label, s.stage) for s in scores}), 'model')}"),
        Cell(text=str(sum(not score.was_found for score in scores)), detail="evaluated tonight, the rest were known"),
        Cell(text=str(len(nights)), detail="nights"),
    ]
    subtitle = f"{tonight.run} · {_when(tonight, zone)}"
    return Report(title="Nightly evals", subtitle=subtitle, cards=cards, sections=sections)


def _tonight(scores: Sequence[NightScore], comparisons: Sequence[NightComparison]) -> list[Part]:
    """Table of scores that may have changed, what is worse first, then of those that have not, folded."""
    rows: dict[str, list[list[Cell]]] = {}
    for score in scores:
        metric = score.metric
        mine = {c.against: c for c in comparisons if c.score == score}
        verdict, tone = _verdict(list(mine.values()))
        tested = [comparison.adjusted for comparison in mine.values() if comparison.found is not None]
        row = [
            Cell(text=line_name(score.label, score.stage), detail=score.run),
            Cell(text=score.benchmark, detail=f"{metric}, {counted(score.num_items, 'item')}"),
            replace(score_cell(score), verdict=verdict, tone=tone),
            _difference(mine.get("last night"), metric),
            _difference(mine.get("best"), metric),
            Cell(text=words.probability(min(tested)) if tested else ""),
        ]
        rows.setdefault("worse" if tone else verdict, []).append(row)
    headers = ["model", "benchmark", "score", "− last night", "− best", "p"]
    parts, unchanged = [], rows.pop(UNCHANGED, [])
    if shown := [*rows.pop("worse", []), *(row for others in rows.values() for row in others)]:
        parts.append(Part(table=Table(headers=headers, rows=shown, numeric=(2, 3, 4, 5))))
    if unchanged:
        table = Table(headers=headers[:3], rows=[row[:3] for row in unchanged], numeric=(2,))
        note = f"{SAME_ANSWERS} as last night"
        parts.append(Part(heading=f"{UNCHANGED}: {len(unchanged)}", note=note, table=table, folded=True))
    return parts


def score_cell(score: Any) -> Cell:
    """A score with its 95 % interval; empty for None. score: value, low, high and metric."""
    if score is None:
        return Cell(text="")
    interval = words.interval(score.low, score.high, score.metric)
    return Cell(text=words.value(score.value, score.metric), detail=interval)


def _difference(comparison: NightComparison | None, metric: str) -> Cell:
    if comparison is None or comparison.found is None:
        return Cell(text="", detail="" if comparison is None or comparison.why == SAME_ANSWERS else comparison.why)
    outcome = comparison.found
    interval, tone = words.signed_interval(outcome.low, outcome.high, metric), "bad" if comparison.is_worse else ""
    return Cell(text=words.signed(outcome.difference, metric), detail=interval, tone=tone)


def _verdict(comparisons: Sequence[NightComparison]) -> tuple[str, str]:
    if worse := [comparison.against for comparison in comparisons if comparison.is_worse]:
        return f"worse than {' and '.join(worse)}", "bad"
    if not comparisons:
        return "first night", ""
    if all(comparison.found is None for comparison in comparisons):
        return UNCHANGED if comparisons[0].why == SAME_ANSWERS else "not comparable", ""
    return "not worse", ""


def _trend_section(nights: Sequence[RunRecord], label: str, stage: str, *, zone: str) -> PageSection:
    """A model's panels, one a benchmark, and its scores night by night as a table."""
    of_model = [
        (place, score)
        for place, night in enumerate(nights)
        for score in night.night.scores
        if (score.label, score.stage) == (label, stage)
    ]
    is_one = len({score.eval for _, score in of_model}) == 1
    series: dict[str, list[tuple[int, NightScore]]] = {}
    for place, score in of_model:
        series.setdefault(score.benchmark if is_one else f"{score.eval}: {score.benchmark}", []).append((place, score))
    dates = dates_below(nights, zone)
    panels = [_panel(points, name, dates) for name, points in series.items()]
    table = _nights_table(series, nights, zone)
    parts = [Part(panels=panels), Part(heading="Night by night", table=table, folded=True)]
    return PageSection(title=line_name(label, stage), parts=parts)


def _panel(points: Sequence[tuple[int, NightScore]], benchmark: str, dates: Sequence[str]) -> Panel:
    metric, step = points[-1][1].metric, max(1, -(-len(dates) // MAX_TICKS))
    ticks = [(place, dates[place]) for place in range(len(dates) - 1, -1, -step)][::-1]
    kept = {place: dict(score) for place, score in points if score.metric == metric}
    return score_panel(f"{benchmark}, {metric}", kept, ticks)


def _nights_table(
    series: Mapping[str, Sequence[tuple[int, NightScore]]], nights: Sequence[RunRecord], zone: str
) -> Table:
    """Newest first: night, run, a column a benchmark."""
    scores = {(key, place): score for key, points in series.items() for place, score in points}
    rows = []
    for place in sorted({place for _, place in scores}, reverse=True):
        mine = [scores.get((key, place)) for key in series]
        run = next(score.run for score in mine if score is not None) or "pinned"
        rows.append([*cells(_when(nights[place], zone), run), *map(score_cell, mine)])
    headers = ["night", "run", *series]
    return Table(headers=headers, rows=rows, numeric=tuple(range(2, len(headers))))


def _due(night: RunRecord, zone: str) -> datetime:
    return datetime.fromtimestamp(night.night.due, ZoneInfo(zone))


def _when(night: RunRecord, zone: str) -> str:
    return f"{_due(night, zone):%Y-%m-%d %H:%M}"


def dates_below(nights: Sequence[RunRecord], zone: str) -> list[str]:
    """Label below each night: its day; its time, where all are of one day; both, where some are."""
    times = [_due(night, zone) for night in nights]
    num_days = len({time.date() for time in times})
    form = "%m-%d" if num_days == len(times) else "%H:%M" if num_days == 1 else "%m-%d\n%H:%M"
    return [f"{time:{form}}" for time in times]
