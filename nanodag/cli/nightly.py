"""`nanodag nightly`: evals by schedule. Each command imports what it needs when it runs."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanodag.cli.parameters import Detach, File, Overrides, Preset

if TYPE_CHECKING:
    from pathlib import Path

    from nanodag.config import Pipeline
    from nanodag.store import Store

nightly_app = typer.Typer(help="Evaluations every night, and what got worse.", no_args_is_help=True)


@nightly_app.command("run")
def run_night(overrides: Overrides = None, preset: Preset = "auto", file: File = "", detach: Detach = False) -> None:
    """Evaluate now, and compare with the nights before.

    Exit code 1 when something got worse by more than noise, or could not be evaluated.

    \b
    nanodag nightly run nightly.stages=[sft,rl]
    """
    import time

    from nanodag.cli.live_table import make_console
    from nanodag.cli.parameters import command
    from nanodag.nightly.nights import PREFIX, check_choice
    from nanodag.run.python_path import note_python_path

    console = make_console()
    path, pipeline, store = settings(overrides or [], preset=preset, file=file)
    check_choice(store, pipeline, path)
    running, parameters = serve(path, pipeline, store, overrides or [])
    name = f"{PREFIX}{time.strftime('%Y%m%d-%H%M%S')}"
    api = running.api()
    note_python_path(store.local, name)
    flow_run = api.create_run(running.deployments["nightly_eval"], name=name, parameters={"name": name, **parameters})
    console.print(f"Night [bold]{name}[/]: {running.url}/runs/flow-run/{flow_run}")
    if not detach:
        code = follow(store, api, name, flow_run)
        console.print(f"Scores and page: {command(f'nightly show {name}')}")
        raise typer.Exit(code)


@nightly_app.command("on")
def turn_on(overrides: Overrides = None, preset: Preset = "auto", file: File = "") -> None:
    """Turn the schedule on, as the preset's `nightly` section says.

    It holds while the server is up.

    \b
    nanodag nightly on --preset small
    """
    from nanodag.cli.live_table import make_console
    from nanodag.errors import ArtifactNotFound
    from nanodag.nightly.nights import check_choice, cron_of, turn

    console = make_console()
    path, pipeline, store = settings(overrides or [], preset=preset, file=file)
    try:
        check_choice(store, pipeline, path)
    except ArtifactNotFound as error:  # what is there by the night counts
        console.print(f"For now: {error}", style="yellow", markup=False, highlight=False)
    running, parameters = serve(path, pipeline, store, overrides or [])
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
    from nanodag.cli.live_table import make_console
    from nanodag.nightly.nights import turn

    running, _ = serve(*settings([], preset=preset, file=file), [])
    turn(running.api(), running.deployments["nightly_eval"], active=False)
    make_console().print("Off.")


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


def settings(overrides: list[str], *, preset: str, file: str) -> "tuple[Path, Pipeline, Store]":
    """The pipeline file, what it says, and its store."""
    from nanodag.config import resolve
    from nanodag.run.record import pipeline_file, store_of

    path = pipeline_file(file)
    pipeline = resolve(path, preset, overrides).pipeline
    return path, pipeline, store_of(pipeline)


def serve(path: "Path", pipeline: "Pipeline", store: "Store", overrides: list[str]) -> tuple[Any, dict[str, Any]]:
    """The running server, and a flow run's parameters: the flow's process has another environment and working
    directory, so it is told all that came from these."""
    from nanodag.cli.live_table import make_console
    from nanodag.config.resolve import portable
    from nanodag.run.record import locations_of
    from nanodag.server.local_server import server_of

    console = make_console()
    running = server_of(pipeline, store, path).ensure(lambda text: console.print(text, style="dim"))
    all_overrides = [*portable(overrides), *locations_of(pipeline, store)]
    return running, {"preset": pipeline.preset, "overrides": list(dict.fromkeys(all_overrides)), "file": str(path)}


def follow(store: Any, api: Any, name: str, flow_run: str) -> int:
    """Show a run until it ends; returns the command's exit code. Ctrl-C leaves it to go on."""
    import time

    from nanodag.cli.live_table import LiveTable, make_console
    from nanodag.server.prefect_api import FINAL_STATES

    console = make_console()

    with LiveTable(console, store) as watch:
        while (state := api.run_state(flow_run))["type"] not in FINAL_STATES:
            watch.show(store.find_run(name), state)
            time.sleep(0.3)
        watch.show(store.find_run(name), state)
    console.print(f"{state['name']}: {state['message']}", markup=False, highlight=False)
    return 0 if state["type"] == "COMPLETED" else 1
