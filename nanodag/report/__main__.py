"""Worker of a report stage: `python -m nanodag.report job.json`."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanodag.config.kind import CONVERSATIONS
from nanodag.config.kinds import recorded_kind
from nanodag.config.kinds.small_stages import MAX_SEARCHED
from nanodag.data.config import SourceConfig
from nanodag.data.contamination import Overlap, contamination
from nanodag.errors.words import counted, size
from nanodag.report.page import build_report, to_html, to_markdown
from nanodag.report.tables import Cell, Table, cells
from nanodag.store.atomic import write_bytes
from nanodag.worker.job import MetricsLog, finish, load_job


def main() -> None:
    job = load_job()
    began = time.monotonic()
    metrics_log = MetricsLog(job)
    metrics_log.write(0, total=2, event="phase", phase="contamination", unit="phases")
    contamination = contamination_table(job.context["stages"], job.config.contamination, job.mirror)
    metrics_log.write(1, total=2, event="phase", phase="pages", unit="phases")
    report = build_report(
        job.run,
        job.context,
        price_per_hour=job.config.price_per_hour,
        contamination=contamination,
        missing=[name for name, source in job.config.inputs.items() if name not in job.inputs],
    )
    job.output.mkdir(exist_ok=True)
    metrics: dict[str, Any] = {}
    for name, text in {"report.html": to_html(report), "report.md": to_markdown(report)}.items():
        # A text of the data or an answer may have half a character, which no page can.
        content = text.encode("utf-8", "replace")
        write_bytes(job.output / name, content)
        metrics[f"{name.replace('.', '_')}_bytes"] = len(content)
    metrics_log.write(2, total=2, unit="phases", **metrics)
    metrics_log.close()
    finish(job, metrics=metrics, cost={"work_seconds": time.monotonic() - began})


def contamination_table(
    stages: Mapping[str, Mapping[str, Any]], benchmarks: Sequence[SourceConfig], mirror: Path | None
) -> Table | None:
    """One row for each benchmark source and each source that a stage trained on; None when none was asked for.

    stages: as in the report's context.
    """
    training = training_urls(stages)
    if not benchmarks or not training:
        return None
    overlaps = contamination(
        training, [source.url for source in benchmarks], mirror=mirror, max_training_bytes=MAX_SEARCHED
    )
    headers = ["benchmark source", "training source", "items found", "of", "share", "read"]
    return Table(headers=headers, rows=[_row(overlap) for overlap in overlaps], numeric=(2, 3, 4, 5))


def training_urls(stages: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Every source that a stage of the report trained on, once; of conversations that a stage selected, its prompts."""
    urls = [
        source["url"]
        for stage in stages.values()
        if (kind := recorded_kind(stage["kind"])).trains or kind.makes == CONVERSATIONS
        for source in stage["config"].get("data", ())
        if isinstance(source, Mapping)  # of a user's own kind it may be anything
        and not str(source["url"]).startswith("input:")
    ]
    return list(dict.fromkeys(urls))


def _row(overlap: Overlap) -> list[Cell]:
    searched = overlap.rows - overlap.rows_too_short
    head = [Cell(text=overlap.benchmark, code=True), Cell(text=overlap.training, code=True)]
    if why := _not_checked(overlap):
        return [*head, Cell(text="not checked", detail=why), *cells("", "", "")]
    share = overlap.rows_found / searched
    short = f"{overlap.rows_too_short} shorter than 13 words" if overlap.rows_too_short else ""
    tone = "bad" if overlap.rows_found else "good" if overlap.complete else ""
    return [
        *head,
        Cell(text=str(overlap.rows_found), tone=tone),
        Cell(text=str(searched), detail=short),
        Cell(text=f"{100 * share:.1f} %"),
        Cell(text=size(overlap.training_bytes), detail="" if overlap.complete else "then stopped"),
    ]


def _not_checked(overlap: Overlap) -> str:
    """Reason for which nothing can be said of a benchmark and a training source; empty where it was looked for."""
    if overlap.rows == 0:
        return "the benchmark source has no rows"
    if overlap.rows_too_short == overlap.rows:
        return f"of {counted(overlap.rows, 'item')} none has 13 words"
    return "" if overlap.training_bytes else "the training source has no text"


if __name__ == "__main__":
    main()
