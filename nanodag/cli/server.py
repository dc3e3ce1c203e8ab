"""`nanodag server`: Prefect's server of a pipeline."""

import typer

from nanodag.cli.parameters import File, Overrides, Preset

server_app = typer.Typer(help="Prefect's server: the UI, and what executes runs.", no_args_is_help=True)


@server_app.command("start")
def server_start(overrides: Overrides = None, file: File = "", preset: Preset = "auto") -> None:
    """Start the server, when it is not up, and print its address.

    \b
    nanodag server start
    """
    from nanodag.cli.chat_report_server import start_server

    start_server(overrides or [], file=file, preset=preset)


@server_app.command("stop")
def server_stop(overrides: Overrides = None, file: File = "", preset: Preset = "auto") -> None:
    """End the server, and the runs that it executes.

    The store keeps what is resumable: resume with nanodag run --name RUN.

    \b
    nanodag server stop
    """
    from nanodag.cli.chat_report_server import stop_server

    stop_server(overrides or [], file=file, preset=preset)


@server_app.command("status")
def server_status(overrides: Overrides = None, file: File = "", preset: Preset = "auto") -> None:
    """Say whether the server is up. Exit code 0 when it is, 3 when it is not."""
    from nanodag.cli.chat_report_server import server_is_up

    raise typer.Exit(0 if server_is_up(overrides or [], file=file, preset=preset) else 3)
