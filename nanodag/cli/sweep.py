"""`nanodag sweep`: start a sweep and follow it. Light: it imports what it needs when it runs."""

from typing import Annotated

import typer

from nanodag.cli.parameters import Detach, File, Overrides, Preset


def sweep(
    overrides: Overrides = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", "-g", metavar="NAME=[A,B]", help="An option and its values; may be repeated."),
    ] = None,
    point: Annotated[
        list[str] | None, typer.Option(metavar="'A=1 B=2'", help="The values of one point; may be repeated.")
    ] = None,
    stage: Annotated[
        str,
        typer.Option(
            "--stage",
            "-s",
            metavar="STAGE",
            help="What is compared. Default: the last one that a point sets a value of.",
        ),
    ] = "",
    at_once: Annotated[
        int, typer.Option("--at-once", "-j", metavar="N", min=1, help="How many stages train at a time.")
    ] = 1,
    preset: Preset = "auto",
    file: File = "",
    name: Annotated[
        str,
        typer.Option(
            "--name", "-n", metavar="SWEEP", help="A new sweep's, or one to resume. Default: preset and time."
        ),
    ] = "",
    detach: Detach = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the points, and run nothing.")] = False,
) -> None:
    """Run a stage with many settings, and compare them.

    What the points have in common is run once. Every combination of the grid's values is a point.

    \b
    nanodag sweep --grid rl.learning_rate=[5e-5,1e-4] --grid rl.seed=[1,2]
    """
    import time

    from nanodag.cli.live_table import make_console
    from nanodag.cli.run import serve, settings, start_and_watch
    from nanodag.errors.words import counted
    from nanodag.run.preflight import check_before_start
    from nanodag.run.record import pipeline_file, unfinished
    from nanodag.sweep.sweep_run import PAGE_STAGE, make_sweep

    console, changes = make_console(), overrides or []
    grid, points = grid or [], [text.split() for text in point or []]
    made = make_sweep(pipeline_file(file), preset, changes, grid, points, stage)
    shared = [name for name in made.pipeline.stages if name in made.points[0].stages]
    console.print(
        f"{counted(len(made.points), 'point')} of stage {made.stage}, {counted(len(made.pipeline.stages), 'stage')}; "
        f"all share {', '.join(shared) or 'none'}",
        highlight=False,
    )
    if dry_run:
        for sweep_point in made.points:
            console.print(f"{sweep_point.number:4d}  {' '.join(sweep_point.overrides)}", highlight=False, markup=False)
        return
    path, pipeline, store = settings(changes, preset=preset, file=file)
    name = name or f"sweep-{pipeline.preset}-{time.strftime('%m%d-%H%M%S')}"
    to_build = unfinished(made.pipeline, store.find_run(name))
    check_before_start(made.pipeline, file=path, remembered=store.local / "checked", to_build=to_build)
    running, parameters = serve(path, pipeline, store, changes)
    parameters |= {"grid": grid, "points": points, "stage": made.stage, "at_once": at_once}
    code = start_and_watch("Sweep", store, running, "sweep", name, parameters, detach=detach)
    if code is None:
        return
    record = store.find_run(name)
    if record is not None and PAGE_STAGE in record.stages:
        folder = store.materialize(store.get(f"{name}:{PAGE_STAGE}"))
        console.print(f"Table and plots: {folder / 'sweep.html'}", soft_wrap=True, highlight=False)
    raise typer.Exit(code)
