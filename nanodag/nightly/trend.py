"""The trend page: scores over nights with their intervals, a line a model and benchmark, and what was compared."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from zoneinfo import ZoneInfo

from nanodag.errors.words import counted
from nanodag.nightly.findings import SAME_ANSWERS, NightComparison, line_name
from nanodag.report import words
from nanodag.report.page import PageSection, Part, Report
from nanodag.report.plots import Panel, panels_svg
from nanodag.report.tables import Cell, Table, cells
from nanodag.store.run_record import NightScore, RunRecord

MAX_TICKS = 5
UNCHANGED = "unchanged"


def trend_report(
    nights: Sequence[RunRecord], comparisons: Sequence[NightComparison], *, false_alarms: float, zone: str
) -> Report:
    """The page of the last of these nights. nights: records with scores, oldest first; comparisons: of the last one."""
    tonight = nights[-1]
    scores, missing, stale = tonight.night.scores, tonight.night.missing, tonight.night.stale
    worse = [comparison for comparison in comparisons if comparison.is_worse]
    note = (
        "Score with its 95 % interval; shares in percent, differences in points. Differences are of the same items, "
        "with their 95 % interval. p is one-sided (McNemar's exact test where items are right or wrong, else Student's "
        "t), corrected by Holm over all tests of the night and for the choice of the best: the chance of any false "
        f"“worse” in a night is below {false_alarms:g}. “Not worse” may hide a small change."
    )
    sections = [PageSection(title="Tonight", note=note, parts=_tonight(scores, comparisons))]
    for title, what, texts, tone in (("Not evaluated", "what", missing, ""), ("Stale", "model", stale, "bad")):
        if texts:
            table = Table(headers=[f"{what}, and why"], rows=[[Cell(text=text, tone=tone)] for text in texts])
            sections.append(PageSection(title=title, parts=[Part(table=table)]))
    for number, (label, stage) in enumerate(dict.fromkeys((score.label, score.stage) for score in scores)):
        sections.append(_trend_section(nights, label, stage, name=f"trend-{number}", zone=zone))
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
            replace(_score_cell(score), verdict=verdict, tone=tone),
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


def _score_cell(score: NightScore | None) -> Cell:
    if score is None:
        return Cell(text="")
    interval = words.interval(score.low, score.high, score.metric)
    return Cell(text=words.value(score.value, score.metric), detail=interval)


def _difference(comparison: NightComparison | None, metric: str) -> Cell:
    if comparison is None or comparison.found is None:
        return Cell(text="", detail="" if comparison is None or comparison.why == SAME_ANSWERS else comparison.why)
    outcome = comparison.found
    low, high = words.signed(outcome.low, metric), words.signed(outcome.high, metric)
    tone = "bad" if comparison.is_worse else ""
    return Cell(text=words.signed(outcome.difference, metric), detail=f"{low} to {high}", tone=tone)


def _verdict(comparisons: Sequence[NightComparison]) -> tuple[str, str]:
    if worse := [comparison.against for comparison in comparisons if comparison.is_worse]:
        return f"worse than {' and '.join(worse)}", "bad"
    if not comparisons:
        return "first night", ""
    if all(comparison.found is None for comparison in comparisons):
        return UNCHANGED if comparisons[0].why == SAME_ANSWERS else "not comparable", ""
    return "not worse", ""


def _trend_section(nights: Sequence[RunRecord], label: str, stage: str, *, name: str, zone: str) -> PageSection:
    """A model's panels, one a benchmark, and its scores night by night as a table."""
    series: dict[tuple[str, str], list[tuple[int, NightScore]]] = {}
    for place, night in enumerate(nights):
        for score in night.night.scores:
            if (score.label, score.stage) == (label, stage):
                series.setdefault((score.eval, score.benchmark), []).append((place, score))
    evals = {eval_name for eval_name, _ in series}
    dates = dates_below(nights, zone)
    panels = [
        _panel(points, benchmark if len(evals) == 1 else f"{eval_name}: {benchmark}", dates)
        for (eval_name, benchmark), points in series.items()
    ]
    table = _nights_table(series, nights, zone)
    parts = [Part(svg=panels_svg(panels, name=name)), Part(heading="Night by night", table=table, folded=True)]
    return PageSection(title=line_name(label, stage), parts=parts)


def _panel(points: Sequence[tuple[int, NightScore]], benchmark: str, dates: Sequence[str]) -> Panel:
    metric = points[-1][1].metric
    kept = [(place, score) for place, score in points if score.metric == metric]
    scale = 100 if words.is_share(metric) else 1
    xs = [place for place, _ in kept]
    value, low, high = ([scale * getattr(score, field) for _, score in kept] for field in ("value", "low", "high"))
    step = max(1, -(-len(dates) // MAX_TICKS))
    ticks = [(place, dates[place]) for place in range(len(dates) - 1, -1, -step)][::-1]
    return Panel(
        title=f"{benchmark}, {metric}{' (%)' if scale == 100 else ''}",
        x_label="",
        lines={"score": (xs, value)},
        marked=("score",),
        intervals={"score": (low, high)},
        ticks=ticks,
    )


def _nights_table(
    series: Mapping[tuple[str, str], Sequence[tuple[int, NightScore]]], nights: Sequence[RunRecord], zone: str
) -> Table:
    """Newest first: night, run, a column a benchmark."""
    scores = {(key, place): score for key, points in series.items() for place, score in points}
    rows = []
    for place in sorted({place for _, place in scores}, reverse=True):
        mine = [scores.get((key, place)) for key in series]
        run = next(score.run for score in mine if score is not None) or "pinned"
        rows.append([*cells(_when(nights[place], zone), run), *map(_score_cell, mine)])
    headers = ["night", "run", *(benchmark for _, benchmark in series)]
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
