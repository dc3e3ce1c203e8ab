"""Tasks of a sweep: what the store does not have, so many stages at a time, and the comparison at the end."""

import re
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture

from nanodag.config.kinds import find_kind
from nanodag.run.record import Run, StageResult
from nanodag.sweep.sweep_run import Sweep, conclude
from tasks.stage_task import start

Futures = dict[str, PrefectFuture[StageResult]]


def build_missing(run: Run, at_once: int) -> Futures:
    """Submit the run's stages: at most at_once that train at a time, an eval as soon as its model is there."""
    run.at_once = at_once
    futures: Futures = {}
    under_way: list[PrefectFuture[StageResult]] = []
    beside = [stage for stage in run.to_do if find_kind(run.pipeline.stages[stage].kind).is_beside]
    for stage in run.to_do:
        if stage in beside:
            continue
        if len(under_way) >= at_once:
            under_way.pop(0).wait()
            for ready in [s for s in beside if s not in futures and _has_inputs(run, s, futures)]:
                start(run, ready, futures)
        if future := start(run, stage, futures):
            under_way.append(future)
    for stage in beside:
        if stage not in futures:
            start(run, stage, futures)
    return futures


def _has_inputs(run: Run, stage: str, futures: Futures) -> bool:
    """True when nothing that a stage takes is still to come. What failed is told by inputs_of, at the end."""
    sources = [source for source in run.pipeline.stages[stage].inputs.values() if source in run.to_do]
    return all(source in futures and futures[source].state.is_completed() for source in sources)


@task(name="comparison", cache_policy=NO_CACHE, persist_result=False)
def comparison(sweep: Sweep, run: Run, results: dict[str, StageResult]) -> Path:
    """Compare the points; publish the page, and show its table in Prefect's UI."""
    page = conclude(sweep, run, results)
    key = re.sub(r"[^a-z0-9]+", "-", f"sweep-{run.name}".lower()).strip("-")
    text = f"{page.with_suffix('.md').read_text(encoding='utf-8')}\nWith plots: `{page}`\n"
    create_markdown_artifact(key=key, markdown=text, description=f"Sweep {run.name}")
    return page
