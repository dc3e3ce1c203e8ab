"""`nanodag sweep`: start a sweep and follow it."""

import time
from collections.abc import Sequence

from nanodag.cli.live_table import make_console
from nanodag.cli.nightly import follow, serve, settings
from nanodag.config import resolve
from nanodag.errors.words import counted
from nanodag.run.preflight import check_before_start
from nanodag.run.python_path import note_python_path
from nanodag.run.record import pipeline_file, store_of, unfinished
from nanodag.sweep.conclude import PAGE_STAGE
from nanodag.sweep.points import make_sweep


def start_sweep(
    overrides: Sequence[str],
    *,
    grid: Sequence[str],
    points: Sequence[str],
    stage: str,
    at_once: int,
    preset: str,
    file: str,
    name: str,
    detach: bool,
    dry_run: bool,
) -> int:
    """Check every point, then run the sweep; returns the command's exit code. points: overrides of one point
    each, separated by spaces."""
    console = make_console()
    listed = [text.split() for text in points]
    made = make_sweep(pipeline_file(file), preset, overrides, grid, listed, stage)
    shared = [name for name in made.pipeline.stages if name in made.points[0].stages]
    console.print(
        f"{counted(len(made.points), 'point')} of stage {made.stage}, {counted(len(made.pipeline.stages), 'stage')}; "
        f"all share {', '.join(shared) or 'none'}",
        highlight=False,
    )
    if dry_run:
        for point in made.points:
            console.print(f"{point.number:4d}  {' '.join(point.overrides)}", highlight=False, markup=False)
        return 0
    name = name or f"sweep-{resolve(pipeline_file(file), preset).pipeline.preset}-{time.strftime('%m%d-%H%M%S')}"
    store = store_of(made.pipeline)
    to_build = unfinished(made.pipeline, store.find_run(name))
    check_before_start(made.pipeline, file=pipeline_file(file), remembered=store.local / "checked", to_build=to_build)
    note_python_path(store.local, name)
    path, pipeline, store = settings(list(overrides), preset=preset, file=file)
    running, parameters = serve(path, pipeline, store, list(overrides))
    about = {"name": name, "grid": list(grid), "points": listed, "stage": made.stage, "at_once": at_once}
    api = running.api()
    flow_run = api.create_run(running.deployments["sweep"], name=name, parameters={**about, **parameters})
    console.print(f"Sweep [bold]{name}[/]: {running.url}/runs/flow-run/{flow_run}")
    if detach:
        return 0
    code = follow(store, api, name, flow_run)
    record = store.find_run(name)
    if record is not None and PAGE_STAGE in record.stages:
        folder = store.materialize(store.get(f"{name}:{PAGE_STAGE}"))
        console.print(f"Table and plots: {folder / 'sweep.html'}", soft_wrap=True, highlight=False)
    return code
