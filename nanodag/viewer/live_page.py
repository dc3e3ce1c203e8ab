"""The report of a run under way, or of several runs over each other: `nanodag report RUN --follow`, on a local page
that asks for its own sections again every two seconds."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse

from nanodag.errors import NanodagError
from nanodag.report.page import Report, build_report, compare_report, to_html
from nanodag.report.summary import has_scores, run_context
from nanodag.run.diff import config_of
from nanodag.run.record import context_stages
from nanodag.store import Store
from nanodag.viewer.app import local_app


def make_app(store: Store, runs: Sequence[str]) -> FastAPI:
    """The application with the page of these runs, and its sections alone at /sections."""
    app = local_app(f"Report of {', '.join(runs)}")

    @cache  # what is finished is verified once: an RL stage's records are large
    def finished(run: str, made: Sequence[Any]) -> dict[str, Any]:
        names, record = [name for name, _ in made], store.read_run(run)
        return context_stages(store, record, names, is_read=has_scores, has_records=lambda artifact: True)

    contexts: dict[str, dict[str, Any]] = {}

    def report() -> Report:
        records = [store.read_run(run) for run in runs]
        for record in records:
            made = tuple((name, entry.artifact) for name, entry in record.stages.items() if entry.artifact is not None)
            known = contexts.get(record.run, {}).get("stages", {})
            contexts[record.run] = run_context(store, record, finished(record.run, made))
            # A run that is resumed looks its stages up again: until then they stay as they were.
            waiting = {name for name, entry in record.stages.items() if entry.state == "waiting"} & known.keys()
            contexts[record.run]["stages"] |= {name: known[name] for name in waiting}
        if len(runs) > 1:
            return compare_report(contexts, {record.run: config_of(record) for record in records})
        return build_report(runs[0], contexts[runs[0]])

    @app.get("/")
    def page() -> HTMLResponse:
        policy = {"Content-Security-Policy": "frame-ancestors 'none'"}  # the page itself says the rest
        return HTMLResponse(to_html(report(), page="live.html.jinja"), headers=policy)

    @app.get("/sections")
    def sections() -> HTMLResponse:
        return HTMLResponse(to_html(report(), page="sections.html.jinja"))

    @app.exception_handler(NanodagError)
    def refuse(request: Request, error: Exception) -> PlainTextResponse:
        return PlainTextResponse(str(error), status_code=503)

    return app
