"""What a sweep comes to: its table and page, kept in the store and in the sweep's record."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nanodag.run.derived_runs import note_page, page_key, publish_page
from nanodag.run.record import Run, StageResult
from nanodag.sweep.points import Sweep

PAGE_STAGE = "comparison"


@dataclass(frozen=True, kw_only=True)
class SweepFindings:
    """page: sweep.html; markdown: its table."""

    page: Path
    markdown: str


def conclude(sweep: Sweep, run: Run, results: Mapping[str, StageResult]) -> SweepFindings:
    """Compare the points and publish the page; one about the same results is found, not drawn again.

    results: stage of the sweep's pipeline -> its result; what failed is not in it.
    """
    config = {"stage": sweep.stage, "points": [[list(p.overrides), dict(p.stages)] for p in sweep.points]}
    artifact = run.store.lookup(page_key(PAGE_STAGE, config, results))
    if artifact is None:
        # They draw, and resample: a sweep of which nothing changed needs neither.
        from nanodag.report.page import to_html, to_markdown
        from nanodag.sweep.results import as_json, rows_of
        from nanodag.sweep.sweep_page import sweep_report

        rows = rows_of(sweep, run, results)
        report = sweep_report(run.name, sweep, rows)
        files = {
            "sweep.html": to_html(report),
            "sweep.md": to_markdown(report),
            "sweep.json": json.dumps(as_json(rows), indent=1),
        }
        metrics = {"num_points": len(rows), "num_failed": sum(row.artifact is None for row in rows)}
        artifact = publish_page(run, PAGE_STAGE, config, results, files, metrics)
    note_page(run, PAGE_STAGE, artifact)
    folder = run.store.materialize(artifact)
    return SweepFindings(page=folder / "sweep.html", markdown=(folder / "sweep.md").read_text(encoding="utf-8"))
