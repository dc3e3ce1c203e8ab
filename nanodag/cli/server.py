"""`nanodag server` and `notify`: Prefect's server of a pipeline. Light: each imports what it needs when it runs."""

from typing import TYPE_CHECKING

import typer

from nanodag.cli.parameters import File, Overrides, Preset, command

if TYPE_CHECKING:
    from nanodag.server.local_server import LocalServer

server_app = typer.Typer(help="Prefect's server: the UI, and what executes runs.", no_args_is_help=True)


def _server(overrides: list[str] | None, file: str, preset: str) -> "LocalServer":
    from nanodag.cli.run import settings
    from nanodag.server.local_server import server_of

    path, pipeline, store = settings(overrides, preset=preset, file=file)
    return server_of(pipeline, store, path)


@server_app.command("start")
def server_start(overrides: Overrides = None, file: File = "", preset: Preset = "auto") -> None:
    """Start the server, when it is not up, and print its address.

    \b
    nanodag server start
    """
    from nanodag.cli.run import ensured

    typer.echo(f"Prefect UI: {ensured(_server(overrides, file, preset)).url}")


@server_app.command("stop")
def server_stop(overrides: Overrides = None, file: File = "", preset: Preset = "auto") -> None:
    """End the server, and the runs that it executes.

    The store keeps what is resumable: resume with nanodag run --name RUN.

    \b
    nanodag server stop
    """
    was_up = _server(overrides, file, preset).stop()
    typer.echo("The Prefect server has ended." if was_up else "No Prefect server was up.")


@server_app.command("status")
def server_status(overrides: Overrides = None, file: File = "", preset: Preset = "auto") -> None:
    """Say whether the server is up. Exit code 0 when it is, 3 when it is not."""
    running, start = _server(overrides, file, preset).running(), command("server start")
    typer.echo(f"Prefect UI: {running.url}" if running else f"No Prefect server is up. Start it: {start}")
    raise typer.Exit(0 if running else 3)


def notify(overrides: Overrides = None, preset: Preset = "auto", file: File = "") -> None:
    """Send a trial message to notify.webhook.

    It hears of runs and nights that fail, and of nights that got worse.

    \b
    nanodag notify
    nanodag notify notify.webhook=env:NANODAG_WEBHOOK
    """
    import json
    import os
    import subprocess
    import sys

    from nanodag.cli.live_table import make_console
    from nanodag.cli.run import ensured, settings
    from nanodag.errors import ConfigError, ServerError
    from nanodag.run.notifications import post
    from nanodag.server.local_server import server_of

    path, pipeline, store = settings(overrides, preset=preset, file=file)
    webhook, console = pipeline.notify.webhook, make_console()
    if webhook == "none":
        raise ConfigError(
            f"notify.webhook of preset {pipeline.preset} is none: nobody is told. Set it in {path}, or try one with: "
            "nanodag notify notify.webhook=env:NAME"
        )
    body = {"run": "trial", "text": "nanodag: a trial of notify.webhook. Runs and nights that fail are told of here."}
    if webhook.startswith("env:"):
        post(webhook, body)
        console.print(
            f"Sent to the address in {webhook.removeprefix('env:')}. The server has the environment that it "
            "was started in."
        )
        return
    server = server_of(pipeline, store, path)
    running = ensured(server)
    ended = subprocess.run(
        [sys.executable, "-m", "tasks.notify", webhook, json.dumps(body)],
        env={**os.environ, **server.environment(running.port)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [""])[-1]
        # A service's error may hold the address.
        reason = last if last.startswith("ValueError: Unable to find block") else last.partition(":")[0]
        raise ServerError(f"notify.webhook {webhook} took no message: {reason}")
    console.print(f"Sent to {webhook}.")
