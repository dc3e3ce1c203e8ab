"""Results of a night: scores, comparisons and the trend page, kept in the store and in the night's record."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanodag.config.nightly import zone_of
from nanodag.errors.words import counted
from nanodag.nightly.compare import compare
from nanodag.nightly.nights import Night, earlier_nights
from nanodag.run.derived_runs import note_page, publish_page
from nanodag.run.record import StageResult
from nanodag.store.run_record import NightScore

PAGE_STAGE = "trend"
KEPT = (
    *("metric", "higher_is_better", "form", "chat", "num_fewshot", "sampling"),
    *("value", "stderr", "low", "high", "num_items"),
)


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
            kept = {field: values[field] for field in KEPT if field in values}
            scores.append(NightScore(**line, run=subject.run, **kept, **artifact, was_found=result.was_found))
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

    from nanodag.nightly.trend import trend_report  # it draws; nothing else here needs what that takes
    from nanodag.report.page import to_html, to_markdown

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
