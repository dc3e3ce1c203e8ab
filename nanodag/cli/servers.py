"""`nanodag server` and `notify`: Prefect's server of a pipeline. `nanodag sampler`: SGLang's environment, which is
another one than the trainer's, and samplers run by hand. Light: each imports what it needs when it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nanodag.cli.parameters import File, Overrides, Preset, command, option
from nanodag.cli.serve import serve_sampler
from nanodag.errors import ConfigError, ServerError
from nanodag.host.folders import ABOVE

if TYPE_CHECKING:
    from nanodag.server.local_server import LocalServer

server_app = typer.Typer(help="Prefect's server: the UI, and what executes runs.", no_args_is_help=True)
sampler_app = typer.Typer(help="SGLang's environment, and samplers that you run yourself.", no_args_is_help=True)


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
    from nanodag.cli.live_table import make_console
    from nanodag.cli.run import ensured, settings
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
        [sys.executable, "-m", f"{ABOVE}tasks.notify", webhook, json.dumps(body)],
        env={**os.environ, **server.environment(running.port)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [""])[-1]
        # A service's error may hold the address.
        reason = last if last.startswith("ValueError: Unable to find block") else last.partition(":")[0]
        raise ServerError(f"notify.webhook {webhook} took no message: {reason}")
    console.print(f"Sent to {webhook}.")


@sampler_app.command()
def install(
    cpu: Annotated[bool | None, option("install.cpu", "--cpu/--cuda")] = None,
    engine: Annotated[Literal["sglang", "vllm"], option("install.engine")] = "sglang",
    folder: Annotated[str, option("install.folder")] = "",
    if_supported: Annotated[bool, option("install.if_supported", "--if-supported")] = False,
) -> None:
    """Make the environment of SGLang or vLLM.

    It takes 2 to 20 minutes, by network and disk. Interrupted, it goes on when called again. What pip says lies in
    install.log in the environment's folder.

    \b
    nanodag sampler install --cpu
    nanodag sampler install --cuda --engine vllm
    """
    from nanodag.cli.live_table import Shown
    from nanodag.host.machine import usable_gpus
    from nanodag.inference.engine_install import TITLES, engine_environment, glibc_version, why_not_on
    from nanodag.inference.engine_install import install as install_engine

    gpus = usable_gpus()
    device: Literal["cpu", "cuda"] = "cpu" if cpu or (cpu is None and not gpus) else "cuda"
    why_not = why_not_on(gpus, glibc_version(), engine) if if_supported or device == "cuda" else ""
    environment = engine_environment(device, engine)
    if if_supported and (why_not or environment.variable in os.environ):
        if gpus:
            typer.echo(f"{TITLES[engine]} is left out: {why_not or f'{environment.variable} names one'}", err=True)
        return
    if why_not:
        typer.echo(f"It will not run here: {why_not}", err=True)
    with Shown() as shown:
        where = Path(folder).absolute() if folder else environment.folder
        python = install_engine(device, where, shown.say, guest=engine, show=shown)
    if folder:
        typer.echo(f"Name it to those who use it: sampler.python, or {environment.variable}={python}")


sampler_app.command("serve")(serve_sampler)
