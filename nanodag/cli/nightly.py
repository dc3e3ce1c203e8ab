"""`nanodag nightly`: evals by schedule. Each command imports what it needs when it runs."""

from typing import Annotated, Any

import typer

from nanodag.cli.parameters import Detach, File, Overrides, Preset

nightly_app = typer.Typer(help="Evaluations every night, and what got worse.", no_args_is_help=True)


@nightly_app.command("run")
def run_night(
    overrides: Overrides = None,
    preset: Preset = "auto",
    file: File = "",
    detach: Detach = False,
) -> None:
    """Evaluate now, and compare with the nights before.

    Exit code 1 when something got worse by more than noise, or could not be evaluated.

    \b
    nanodag nightly run nightly.stages=[sft,rl]
    """
    import time

    from nanodag.cli.live_table import make_console
    from nanodag.cli.said import command
    from nanodag.nightly.nights import PREFIX
    from nanodag.run.python_path import note_python_path

    console = make_console()
    store, running, parameters = asked(overrides or [], preset=preset, file=file)
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
    from nanodag.config import resolve
    from nanodag.nightly.switch import cron_of, turn
    from nanodag.run.record import pipeline_file

    _, running, parameters = asked(overrides or [], preset=preset, file=file)
    cron = cron_of(resolve(pipeline_file(file), preset, overrides or []).pipeline.nightly)
    given = {"by_schedule": True, **parameters}
    turn(running.api(), running.deployments["nightly_eval"], active=True, schedule=cron, parameters=given)
    make_console().print(f"On: {cron['cron']}, {cron['timezone']}, while the server is up. Off: nanodag nightly off")


@nightly_app.command("off")
def turn_off(preset: Preset = "auto", file: File = "") -> None:
    """Turn the schedule off.

    \b
    nanodag nightly off
    """
    from nanodag.cli.live_table import make_console
    from nanodag.nightly.switch import turn

    _, running, _ = asked([], preset=preset, file=file)
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
    from nanodag.config import resolve
    from nanodag.errors import ArtifactNotFound
    from nanodag.nightly.findings import PAGE_STAGE
    from nanodag.nightly.nights import nights_of
    from nanodag.run.record import pipeline_file, store_of

    console = make_console()
    store = store_of(resolve(pipeline_file(file)).pipeline)
    nights = [n for n in nights_of(store) if "attempt" in n["stages"].get(PAGE_STAGE, {}) and name in ("", n["run"])]
    if not nights:
        raise ArtifactNotFound(f"{store.url} has no finished night{' ' + name if name else ''}: nanodag nightly run")
    entry = nights[-1]["stages"][PAGE_STAGE]
    folder = store.materialize(store.attempt(entry["key"], entry["attempt"]))
    console.print(Markdown((folder / "trend.md").read_text(encoding="utf-8")))
    console.print(str(folder / "trend.html"), soft_wrap=True, highlight=False)


def asked(overrides: list[str], *, preset: str, file: str) -> tuple[Any, Any, dict[str, Any]]:
    """The store, its running server, and a flow run's parameters: the flow's process has another environment and
    working directory, so it is told all that came from these."""
    from nanodag.cli.live_table import make_console
    from nanodag.config import resolve
    from nanodag.config.resolve import portable
    from nanodag.run.record import locations_of, pipeline_file, store_of
    from nanodag.server.local_server import server_of

    console = make_console()
    path = pipeline_file(file)
    pipeline = resolve(path, preset, overrides).pipeline
    store = store_of(pipeline)
    running = server_of(pipeline, store, path).ensure(lambda text: console.print(text, style="dim"))
    told = [*portable(overrides), *locations_of(pipeline, store)]
    return store, running, {"preset": pipeline.preset, "overrides": list(dict.fromkeys(told)), "file": str(path)}


def follow(store: Any, api: Any, name: str, flow_run: str) -> int:
    """Show a run until it ends; returns the command's exit code. Ctrl-C leaves it to go on."""
    import time

    from nanodag.cli.live_table import LiveTable, make_console
    from nanodag.errors import ArtifactNotFound
    from nanodag.server.local_server import FINAL_STATES

    console = make_console()

    def record() -> dict[str, Any]:
        try:
            return store.read_run(name)
        except ArtifactNotFound:  # the flow's process has not begun it yet
            return {}

    with LiveTable(console, store) as watch:
        while (state := api.run_state(flow_run))["type"] not in FINAL_STATES:
            watch.show(record(), state)
            time.sleep(0.3)
        watch.show(record(), state)
    console.print(f"{state['name']}: {state['message']}", markup=False, highlight=False)
    return 0 if state["type"] == "COMPLETED" else 1
