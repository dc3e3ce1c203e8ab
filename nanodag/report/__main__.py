"""Worker of a report stage: `python -m nanodag.report job.json`."""

import time
from typing import Any

from nanodag.report.contamination_table import contamination_table
from nanodag.report.page import build_report, to_html, to_markdown
from nanodag.report.tables import Table
from nanodag.store.atomic import write_bytes
from nanodag.worker.job import Job, MetricsLog, finish, load_job


def main() -> None:
    job = load_job()
    began = time.monotonic()
    metrics_log = MetricsLog(job)
    metrics_log.write(0, total=2, event="phase", phase="contamination", unit="phases")
    contamination = contamination_table(job.context["stages"], job.config.contamination, job.mirror)
    metrics_log.write(1, total=2, event="phase", phase="pages", unit="phases")
    metrics = write_report(job, contamination)
    metrics_log.write(2, total=2, unit="phases", **metrics)
    metrics_log.close()
    finish(job, metrics=metrics, cost={"work_seconds": time.monotonic() - began})


def write_report(job: Job, contamination: Table | None) -> dict[str, Any]:
    """Write both pages into the job's output; returns their sizes in bytes."""
    report = build_report(
        job.run,
        job.context,
        price_per_hour=job.config.price_per_hour,
        contamination=contamination,
        missing=[name for name, source in job.config.inputs.items() if name not in job.inputs],
    )
    job.output.mkdir(exist_ok=True)
    pages = {"report.html": to_html(report), "report.md": to_markdown(report)}
    # A text of the data or an answer may have half a character, which no page can.
    contents = {name: text.encode("utf-8", "replace") for name, text in pages.items()}
    for name, content in contents.items():
        write_bytes(job.output / name, content)
    return {f"{name.replace('.', '_')}_bytes": len(content) for name, content in contents.items()}


if __name__ == "__main__":
    main()
