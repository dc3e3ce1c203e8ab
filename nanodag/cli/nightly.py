"""`nanodag nightly`: evals by schedule. Each command imports what it needs when it runs."""

from typing import Annotated

import typer

from nanodag.cli.parameters import Detach, File, Overrides, Preset

nightly_app = typer.Typer(help="Evaluations every night, and what got worse.", no_args_is_help=True)


@nightly_app.command("run")
def run_night(overrides: Overrides = None, preset: Preset = "auto", file: File = "", detach: Detach = False) -> None:
    """Evaluate now, and compare with the nights before.

    Exit code 1 when something got worse by more than noise, or could not be evaluated.

    \b
    nanodag nightly run nightly.stages=[sft,rl]
    """
    import time

    from nanodag.cli.parameters import command
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
    from nanodag.errors import ArtifactNotFound
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
def show_night(
    name: Annotated[
        str, typer.Argument(metavar="NIGHT", help="A night, as nanodag status lists them. Default: the newest.")
    ] = "",
    file: File = "",
) -> None:
    """Print a night's scores, and where its page lies.

    \b
    nanodag nightly show
    """
    from rich.markdown import Markdown

    from nanodag.cli.live_table import make_console
    from nanodag.errors import ArtifactNotFound
    from nanodag.nightly.findings import PAGE_STAGE
    from nanodag.nightly.nights import nights_of
    from nanodag.run.record import served_store

    console = make_console()
    store = served_store(file)
    nights = [n for n in nights_of(store) if PAGE_STAGE in n.stages and name in ("", n.run)]
    if not nights:
        raise ArtifactNotFound(f"{store.url} has no finished night{' ' + name if name else ''}: nanodag nightly run")
    folder = store.materialize(store.get(f"{nights[-1].run}:{PAGE_STAGE}"))
    console.print(Markdown((folder / "trend.md").read_text(encoding="utf-8")))
    console.print(str(folder / "trend.html"), soft_wrap=True, highlight=False)
