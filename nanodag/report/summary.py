"""A run as it is now, also where it has no report or one that is stale: the context of its report, and a summary of its
scores, what got better and worse by more than noise, and what to beware of."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanodag.config.kind import SCORES
from nanodag.config.kinds import recorded_kind
from nanodag.report import tables, words
from nanodag.report.gather import Comparison, ReportedStage, columns_of, comparisons_of, stages_of, warnings_of
from nanodag.report.tables import Table
from nanodag.run.progress import UNDER_WAY, progress_of
from nanodag.run.record import context_stages, state_of, unfinished_stages
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
    return stages_of({"stages": _finished(store, record)})


def _finished(store: Store, record: RunRecord) -> dict[str, Any]:
    """Context of each finished stage, but of an evaluation whose scores are not there."""
    scorers = [name for name, entry in record.stages.items() if recorded_kind(entry.kind).makes == SCORES]
    samples: dict[str, Any] = {"has_records": lambda artifact: recorded_kind(artifact.kind).config.makes_rollouts}
    contexts = context_stages(store, record, list(record.stages), is_read=has_scores, **samples)
    return {name: raw for name, raw in contexts.items() if raw["files"] or name not in scorers}


def summary_of(store: Store, record: RunRecord) -> Summary:
    """The summary of a run. Raises StoreError when an artifact is damaged or gone."""
    stages = scored_stages(store, record)
    columns = columns_of(stages)
    comparisons = comparisons_of(columns, stages)
    return Summary(
        scores=tables.scores_table(columns, is_short=True) if columns else None,
        better=tuple(_line(c) for c in comparisons if c.verdict == "better"),
        worse=tuple(_line(c) + _remedy(c) for c in comparisons if c.verdict == "worse"),
        num_compared=len(comparisons),
        warnings=tuple(warnings_of(stages, {})),
    )


def has_scores(artifact: Artifact) -> bool:
    """True for an eval's artifact that its worker has written whole."""
    return recorded_kind(artifact.kind).makes == SCORES and "results.json" in artifact.files


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


def _remedy(comparison: Comparison) -> str:
    """Settings that keep more of what a stage's model knew before; empty where the stage did not train it."""
    stage = comparison.after.stage
    if not (comparison.is_parent and stage.kind.trains and comparison.same_form):
        return ""
    own = f"{stage.name}.kl_coefficient=0.1, or " if stage.kind.config.makes_rollouts else "or "
    return f"; what it knew stays with a share of that task in {stage.name}.data, {own}a lower learning rate"


def run_context(store: Store, record: RunRecord, finished: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Context of a run's report (nanodag.report) as the run is now. finished: its finished stages, where they have been
    read. Raises StoreError when an artifact is damaged or gone."""
    if finished is None:
        finished = _finished(store, record)
    lost = (*UNDER_WAY, "queued") if record.is_gone else ()
    gone: dict[str, Any] = {"state": "interrupted", "speed": "", "left_s": -1.0, "elapsed_s": -1.0}
    return {
        **{"preset": record.preset, "description": state_of(record), "origins": record.origins},
        **{"stale": stale_stages(record), "stages": {**finished, **unfinished_stages(record, finished)}},
        "progress": [replace(s, **gone) if s.state in lost else s for s in progress_of(store, record)],
    }
