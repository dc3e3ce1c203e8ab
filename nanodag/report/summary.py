"""Summary of a run: its scores, what got better and worse by more than noise, and what to beware of.

It says what the report says, by the same functions, of the run as it is now: also where it has no report, or one that
is stale.
"""

from dataclasses import dataclass

from nanodag.config.kind import SCORES
from nanodag.config.kinds import recorded_kind
from nanodag.errors.words import counted, duration
from nanodag.report import tables, words
from nanodag.report.gather import Comparison, ReportedStage, columns_of, comparisons_of, stages_of, warnings_of
from nanodag.report.page import PageSection, Part, Report
from nanodag.report.tables import Cell, Table, cells
from nanodag.run.record import context_stages
from nanodag.run.stale_stages import stale_stages
from nanodag.store import Artifact, Store
from nanodag.store.run_record import RunRecord


@dataclass(frozen=True, kw_only=True)
class Summary:
    """scores: None where nothing was evaluated. better, worse: lines, each a difference beyond noise between a model
    and the one it comes from, or one beside it. num_compared: how many were looked at, and their p-values corrected
    for. warnings: lines, without what is stale."""

    scores: Table | None
    better: tuple[str, ...]
    worse: tuple[str, ...]
    num_compared: int
    warnings: tuple[str, ...]


def scored_stages(store: Store, record: RunRecord) -> dict[str, ReportedStage]:
    """A run's stages with their scores, from its record. Raises StoreError when an artifact is damaged or gone."""
    scorers = [name for name, entry in record.stages.items() if recorded_kind(entry.kind).makes == SCORES]
    contexts = context_stages(store, record, list(record.stages), is_read=_has_scores, has_records=_has_samples)
    return stages_of({"stages": {name: raw for name, raw in contexts.items() if raw["files"] or name not in scorers}})


def summary_of(store: Store, record: RunRecord) -> Summary:
    """The summary of a run. Raises StoreError when an artifact is damaged or gone."""
    stages = scored_stages(store, record)
    columns = columns_of(stages)
    comparisons = comparisons_of(columns, stages)
    return Summary(
        scores=tables.scores_table(columns, is_short=True) if columns else None,
        better=tuple(_line(c) for c in comparisons if c.verdict == "better"),
        worse=tuple(_line(c) for c in comparisons if c.verdict == "worse"),
        num_compared=len(comparisons),
        warnings=tuple(warnings_of(stages, {})),
    )


def _has_scores(artifact: Artifact) -> bool:
    return recorded_kind(artifact.kind).makes == SCORES and "results.json" in artifact.files


def _has_samples(artifact: Artifact) -> bool:
    return recorded_kind(artifact.kind).config.makes_rollouts


def _line(comparison: Comparison) -> str:
    """`sort: RL over SFT +47.5 points (+42.0 to +53.0, p < 0.001)`."""
    result, metric = comparison.found, comparison.metric
    p = words.probability(comparison.adjusted)
    interval = words.signed_interval(result.low, result.high, metric)
    form = "" if comparison.same_form else ", asked in different forms"
    return (
        f"{comparison.benchmark}: {comparison.after.label} over {comparison.before.label} "
        f"{words.signed(result.difference, metric)} {words.points(metric)} "
        f"({interval}, p {p if p.startswith('<') else f'= {p}'}{form})"
    )


def summary_report(record: RunRecord, summary: Summary) -> Report:
    """The summary as a page: the artifact of a run in Prefect's UI."""
    sections = []
    if summary.scores is not None:
        note = "Score, 95 % interval. Shares in percent."
        sections.append(PageSection(title="Scores", note=note, parts=[Part(table=summary.scores)]))
    if summary.num_compared:
        changes = [(line, tone) for lines, tone in ((summary.better, "good"), (summary.worse, "bad")) for line in lines]
        rows = [
            [Cell(text="better" if tone == "good" else "worse", tone=tone), Cell(text=text)] for text, tone in changes
        ]
        note = f"Of {counted(summary.num_compared, 'comparison')} between models, {len(rows)} beyond noise."
        parts = [Part(table=Table(headers=["", "difference"], rows=rows))] if rows else []
        sections.append(PageSection(title="Better and worse", note=note, parts=parts))
    stale = stale_stages(record)
    seconds = {name: e.made.cost_of("seconds", 0.0) if e.made is not None else 0.0 for name, e in record.stages.items()}
    rows = [
        [
            *cells(name, recorded_kind(entry.kind).name),
            Cell(text="stale" if name in stale else entry.state, detail=stale.get(name, "")),
            Cell(text=entry.key[:12], code=True),
            *cells(duration(seconds[name]) if seconds[name] else ""),
        ]
        for name, entry in record.stages.items()
    ]
    table = Table(headers=["stage", "kind", "state", "key", "took"], rows=rows, numeric=(4,))
    sections.append(PageSection(title="Stages", parts=[Part(table=table)]))
    return Report(
        title=f"Run {record.run}",
        subtitle=f"preset {record.preset}",
        cards=(),
        warnings=[*warnings_of({}, stale), *summary.warnings],
        sections=sections,
    )
