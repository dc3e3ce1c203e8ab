"""Summary of a run, where its flow run is looked at."""

from typing import Any

import httpx
import jinja2
from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.states import State

from nanodag.errors import NanodagError
from nanodag.run.record import Run
from nanodag.run.stale_stages import advice, stale_stages


def concluded(run: Run, state: State[Any]) -> State[Any]:
    """End of a flow, with what is stale now in its message; an artifact has scores, changes, warnings and stages."""
    # They compare and render: a flow's start need not wait for what that takes.
    from nanodag.report.page import to_markdown
    from nanodag.report.summary import summary_of, summary_report

    record = run.store.read_run(run.name)
    try:
        summary = summary_of(run.store, record)
        for text in summary.warnings:
            get_run_logger().warning("%s", text)
        create_markdown_artifact(
            key=f"run-{run.name}".lower().replace("_", "-").replace(".", "-"),
            markdown=to_markdown(summary_report(record, summary)),
            description=f"Scores and stages of {run.name}",
        )
    except (NanodagError, OSError, ValueError, httpx.HTTPError, jinja2.TemplateError) as error:  # what is built stays
        get_run_logger().warning("No summary of run %s: %s", run.name, error)
    if stale := stale_stages(record):
        state.message = f"{state.message}\nStale now: {', '.join(stale)}; build again with: {advice(run.name)}"
    return state
