"""`nanodag rerun`, `sweep`, `scale` and `nightly`: runs that are put together of stages of others. Light: each imports
what it needs when it runs."""

import json
import time
from typing import Annotated

import typer

from nanodag.cli.parameters import Detach, File, Overrides, Preset, ThisRun, argument, command, option
from nanodag.errors import ArtifactNotFound, ConfigError
from nanodag.errors.words import counted

AtOnce = Annotated[int, option("at_once", "--at-once", "-j")]
SweepName = Annotated[str, option("sweep_name", "--name", "-n")]
DryRun = Annotated[bool, option("dry_run", "--dry-run")]

nightly_app = typer.Typer(help="Evaluations every night, and what got worse.", no_args_is_help=True)


@nightly_app.command("run")
def run_night(overrides: Overrides = None, preset: Preset = "auto", file: File = "", detach: Detach = False) -> None:
    """Evaluate now, and compare with the nights before.

    Exit code 1 when something got worse by more than noise, or could not be evaluated.

    \b
    nanodag nightly run nightly.stages=[sft,rl]
    """
    from nanodag.cli.run import serve, settings, start_and_watch
    from nanodag.nightly.nights import PREFIX, check_choice

    path, pipeline, store = settings(overrides, preset=preset, file=file)
    check_choice(store, pipeline, path)
    running, parameters = serve(path, pipeline, store, overrides)
    name = f"{PREFIX}{time.strftime('%Y%m%d-%H%M%S')}"
    code = start_and_watch("Night", store, running, "nightly_eval", name, parameters, detach=detach)
    if code is not None:
        typer.echo(f"Scores and page: {command(f'nightly show {name}')}")
        raise typer.Exit(code)


@nightly_app.command("on")
def turn_on(overrides: Overrides = None, preset: Preset = "auto", file: File = "") -> None:
    """Turn the schedule on, as the preset's `nightly` section says.

    It holds while the server is up.

    \b
    nanodag nightly on --preset small
    """
    from nanodag.cli.live_table import make_console
    from nanodag.cli.run import serve, settings
    from nanodag.nightly.nights import check_choice, cron_of, turn

    console = make_console()
    path, pipeline, store = settings(overrides, preset=preset, file=file)
    try:
        check_choice(store, pipeline, path)
    except ArtifactNotFound as error:  # what is there by the night counts
        console.print(f"For now: {error}", style="yellow", markup=False, highlight=False)
    running, parameters = serve(path, pipeline, store, overrides)
    cron = cron_of(pipeline.nightly)
    flow_parameters = {"by_schedule": True, **parameters}
    turn(running.api(), running.deployments["nightly_eval"], active=True, schedule=cron, parameters=flow_parameters)
    console.print(f"On: {cron['cron']}, {cron['timezone']}, while the server is up. Off: nanodag nightly off")


@nightly_app.command("off")
def turn_off(preset: Preset = "auto", file: File = "") -> None:
    """Turn the schedule off.

    \b
    nanodag nightly off
    """
    from nanodag.cli.run import serve, settings
    from nanodag.nightly.nights import turn

    running, _ = serve(*settings(None, preset=preset, file=file), None)
    turn(running.api(), running.deployments["nightly_eval"], active=False)
    typer.echo("Off.")


@nightly_app.command("show")
def show_night(name: Annotated[str, argument("show_night.name")] = "", file: File = "") -> None:
    """Print a night's scores, and where its page lies.

    \b
    nanodag nightly show
    """
    from nanodag.cli.live_table import make_console, print_markdown
    from nanodag.nightly.findings import PAGE_STAGE
    from nanodag.nightly.nights import nights_of
    from nanodag.run.record import served_store

    console = make_console()
    store = served_store(file)
    nights = [n for n in nights_of(store) if PAGE_STAGE in n.stages and name in ("", n.run)]
    if not nights:
        raise ArtifactNotFound(f"{store.url} has no finished night{' ' + name if name else ''}: nanodag nightly run")
    folder = store.materialize(store.get(f"{nights[-1].run}:{PAGE_STAGE}"))
    print_markdown(console, (folder / "trend.md").read_text(encoding="utf-8"))
    console.print(str(folder / "trend.html"), soft_wrap=True, highlight=False)


def sweep(
    overrides: Overrides = None,
    grid: Annotated[list[str] | None, option("sweep.grid", "--grid", "-g")] = None,
    point: Annotated[list[str] | None, option("sweep.point")] = None,
    stage: Annotated[str, option("sweep.stage", "--stage", "-s")] = "",
    predict: Annotated[int, option("sweep.predict")] = 0,
    at_once: AtOnce = 1,
    preset: Preset = "auto",
    file: File = "",
    name: SweepName = "",
    detach: Detach = False,
    dry_run: DryRun = False,
    halving: Annotated[int, option("sweep.halving")] = 0,
) -> None:
    """Run a stage with many settings, and compare them.

    What the points have in common is run once. Every combination of the grid's values is a point. With --halving 3 a
    point goes on beyond 1/9 and 1/3 of its way only while it is among the best third so far.

    \b
    nanodag sweep --grid rl.learning_rate=[5e-5,1e-4] --grid rl.seed=[1,2]
    """
    from nanodag.cli.live_table import make_console
    from nanodag.cli.run import serve, settings, start_and_watch
    from nanodag.config.resolve import portable
    from nanodag.run.preflight import check_before_start
    from nanodag.run.record import pipeline_file, unfinished
    from nanodag.sweep.sweep_run import PAGE_STAGE, make_sweep

    console, changes = make_console(), overrides or []
    grid, points = portable(grid or []), [portable(text.split()) for text in point or []]
    made = make_sweep(pipeline_file(file), preset, changes, grid, points, stage, predict=predict)
    if halving:
        from nanodag.sweep.halving import check_halving

        check_halving(made, halving)
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
    check_before_start(made.pipeline, store, file=path, to_build=to_build)
    running, parameters = serve(path, pipeline, store, changes)
    parameters |= {"grid": grid, "points": points, "stage": made.stage, "at_once": at_once, "predict": predict}
    parameters |= {"halving": halving}
    code = start_and_watch("Sweep", store, running, "sweep", name, parameters, detach=detach)
    if code is None:
        return
    record = store.find_run(name)
    if record is not None and PAGE_STAGE in record.stages:
        folder = store.materialize(store.get(f"{name}:{PAGE_STAGE}"))
        if predict:
            law = json.loads((folder / "scaling.json").read_text(encoding="utf-8"))
            console.print("\n".join(law["lines"]), soft_wrap=True, highlight=False, markup=False)
            code = code if law["is_fitted"] else 1
        console.print(f"Table and plots: {folder / 'sweep.html'}", soft_wrap=True, highlight=False)
    raise typer.Exit(code)


def scale(
    overrides: Overrides = None,
    depths: Annotated[str, option("scale.depths")] = "1,2,3",
    tokens: Annotated[str, option("scale.tokens")] = "",
    target_flops: Annotated[str, option("scale.target_flops")] = "",
    predict: Annotated[int, option("scale.predict")] = 0,
    stage: Annotated[str, option("scale.stage", "--stage", "-s")] = "pretrain",
    at_once: AtOnce = 1,
    preset: Preset = "auto",
    file: File = "",
    name: SweepName = "",
    detach: Detach = False,
    dry_run: DryRun = False,
) -> None:
    """Fit a scaling law to small models, and predict a bigger one.

    A sweep: tokenizer and data are shared. Its page and scaling.json have the law. The bigger model is not trained.

    \b
    nanodag scale --depths 1,2,3 --predict 4
    nanodag scale --depths 2,3,4 --target-flops 4e12,1e13 --predict 6
    """
    from nanodag.run.record import pipeline_file
    from nanodag.sweep.scaling import numbers_of, scaling_points

    points = scaling_points(pipeline_file(file), preset, overrides or [], stage, depths, tokens, target_flops)
    predict = predict or int(max(numbers_of("--depths", depths), default=0)) + 1
    sweep(overrides, [], points, stage, predict, at_once, preset, file, name, detach, dry_run)


def rerun(
    run: ThisRun,
    overrides: Overrides = None,
    stage: Annotated[str, option("rerun.stage", "--stage", "-s")] = "",
    begin_at: Annotated[str, option("rerun.begin_at", "--from")] = "",
    stale: Annotated[bool, option("rerun.stale", "--stale")] = False,
    force: Annotated[bool, option("rerun.force", "--force")] = False,
    file: File = "",
    detach: Detach = False,
) -> None:
    """Run a stage again, all from one on, or what is stale.

    Give --stage, --from or --stale. What comes before is taken as the run left it. Without other values and without
    --force, what is finished is found in the store, and what failed goes on from its newest checkpoint.

    \b
    nanodag rerun RUN --stage rl rl.learning_rate=5e-7
    nanodag rerun RUN --from sft --force
    nanodag rerun RUN --stale
    """
    if bool(stage) + bool(begin_at) + stale != 1:
        raise ConfigError(
            "Say either --stage STAGE, for that stage alone, --from STAGE, for it and what follows it, or --stale, for "
            "what is stale."
        )
    from nanodag.cli.live_table import make_console
    from nanodag.cli.run import start, take_over
    from nanodag.cli.show import find_run, print_warnings
    from nanodag.config import resolve
    from nanodag.config.resolve import portable
    from nanodag.host.machine import machine_of
    from nanodag.run.preflight import check_before_start
    from nanodag.run.python_path import note_python_path
    from nanodag.run.record import check_gpus, pipeline_file, recorded_run, served_store
    from nanodag.server.local_server import server_of

    began, console, changes = time.monotonic(), make_console(), portable(overrides or [])
    store = served_store(file)
    name = find_run(store, run).run
    stages, recorded = recorded_run(store, name, stage=stage, begin_at=begin_at, stale=stale, overrides=changes)
    path = pipeline_file(recorded.file)
    resolved = resolve(path, recorded.preset, recorded.overrides, machine=machine_of(recorded.machine))
    pipeline = resolved.pipeline
    server = server_of(pipeline, store, path)
    take_over(store, name, server, console)
    check_gpus(name, resolved, stages, None)
    check_before_start(pipeline, store, file=path, stages=stages)
    note_python_path(store.local, name)
    console.print(f"Run [bold]{name}[/]: {', '.join(stages)} again; store {store.url}")
    print_warnings(console, resolved.warnings)
    which = {"stage": stage} if stage else {"stale": "only"} if stale else {"begin_at": begin_at}
    parameters = {"overrides": changes, "force": force, **which}
    raise typer.Exit(start(store, server, name, parameters, detach=detach, began=began))
