"""The task of a sweep that compares its points at the end."""

import re
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from nanodag.run.record import Run, StageResult
from nanodag.sweep.sweep_run import Sweep, conclude


@task(name="comparison", cache_policy=NO_CACHE, persist_result=False)
def comparison(sweep: Sweep, run: Run, results: dict[str, StageResult]) -> Path:
    """Compare the points; publish the page, and show its table in Prefect's UI."""
    page = conclude(sweep, run, results)
    key = re.sub(r"[^a-z0-9]+", "-", f"sweep-{run.name}".lower()).strip("-")
    text = f"{page.with_suffix('.md').read_text(encoding='utf-8')}\nWith plots: `{page}`\n"
    create_markdown_artifact(key=key, markdown=text, description=f"Sweep {run.name}")
    return page
