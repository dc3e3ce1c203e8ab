"""The `nanodag` command. Each subcommand imports what it needs when it runs, so that --help answers at once."""

import sys
from typing import Annotated

import typer

from nanodag.cli import said
from nanodag.cli import store as store_commands
from nanodag.cli.nightly import nightly_app
from nanodag.cli.sampler import sampler_app
from nanodag.errors import ConfigError, NanodagError

app = typer.Typer(
    name="nanodag",
    help="Train a chat model from raw text to GRPO as one resumable DAG.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
server_app = typer.Typer(help="The Prefect server of the store: UI and what carries runs out.", no_args_is_help=True)
app.add_typer(server_app, name="server")
app.add_typer(nightly_app, name="nightly")
app.add_typer(sampler_app, name="sampler")

Preset = Annotated[str, typer.Option("--preset", "-p", help="A preset of the pipeline file; auto goes by hardware.")]
File = Annotated[str, typer.Option("--file", "-f", help="The pipeline file; else ./pipeline.yaml, else nanodag's own.")]
RunName = Annotated[str, typer.Argument(help="A run's name, or how it begins; the newest run unless given.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="dotted.name=value, as in rl.learning_rate=2e-6")]


@app.command()
def run(
    overrides: Overrides = None,
    preset: Preset = "auto",
    file: File = "",
    name: Annotated[str, typer.Option("--name", "-n", help="A new run, or one to go on with.")] = "",
    detach: Annotated[bool, typer.Option("--detach", help="Leave once it has begun.")] = False,
) -> None:
    """Carry out a pipeline: what of it the store does not have yet. Ctrl-C stops it and leaves a resumable state."""
    from nanodag.cli.run import run_pipeline

    raise typer.Exit(run_pipeline(overrides or [], preset=preset, file=file, name=name, detach=detach))


@app.command()
def rerun(
    run: Annotated[str, typer.Argument(help="A run's name, or how it begins.")],
    overrides: Overrides = None,
    stage: Annotated[str, typer.Option("--stage", "-s", help="That stage alone.")] = "",
    begin_at: Annotated[str, typer.Option("--from", help="That stage and all that follow it.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Build again though the store has it.")] = False,
    file: File = "",
    detach: Annotated[bool, typer.Option("--detach", help="Leave once it has begun.")] = False,
) -> None:
    """Carry out one stage of a run again, or one and what follows: nanodag rerun RUN --stage rl rl.learning_rate=5e-7

    What comes before is taken as the run left it. Without other values and without --force, what is finished is found
    in the store, and what failed goes on from its newest checkpoint.
    """
    from nanodag.cli.rerun import rerun as carry_out_again

    raise typer.Exit(
        carry_out_again(overrides or [], run=run, stage=stage, begin_at=begin_at, force=force, file=file, detach=detach)
    )


@app.command()
def sweep(
    overrides: Overrides = None,
    grid: Annotated[list[str] | None, typer.Option("--grid", "-g", help="rl.learning_rate=[1e-6,2e-6]; again.")] = None,
    point: Annotated[list[str] | None, typer.Option("--point", help="One point: 'a.b=1 c.d=2'; again.")] = None,
    stage: Annotated[str, typer.Option("--stage", "-s", help="What is compared; else the last that is set.")] = "",
    at_once: Annotated[int, typer.Option("--at-once", "-j", min=1, help="Stages that train at a time.")] = 1,
    preset: Preset = "auto",
    file: File = "",
    name: Annotated[str, typer.Option("--name", "-n", help="A new sweep, or one to go on with.")] = "",
    detach: Annotated[bool, typer.Option("--detach", help="Leave once it has begun.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the points.")] = False,
) -> None:
    """Carry out a stage with many settings, sharing what comes before it, and compare them."""
    from nanodag.cli.sweep import start_sweep

    how = {"stage": stage, "at_once": at_once, "preset": preset, "file": file, "name": name}
    code = start_sweep(overrides or [], grid=grid or [], points=point or [], detach=detach, dry_run=dry_run, **how)
    raise typer.Exit(code)


@app.command()
def config(overrides: Overrides = None, preset: Preset = "auto", file: File = "") -> None:
    """Print the resolved config, and where each value comes from."""
    from nanodag.cli.show import show_config

    show_config(overrides or [], preset=preset, file=file)


@app.command()
def status(
    file: File = "",
    all_runs: Annotated[bool, typer.Option("--all", help="Every run, not only the newest.")] = False,
) -> None:
    """Show runs, their stages, keys, sizes and times."""
    from nanodag.cli.show import show_status

    show_status(file=file, all_runs=all_runs)


@app.command()
def stages(run: RunName = "", file: File = "") -> None:
    """Show the lineage of a run: every stage, what it came from, what it cost."""
    from nanodag.cli.show import show_stages

    show_stages(run, file=file)


@app.command()
def chat(
    run: RunName = "",
    stage: Annotated[str, typer.Argument(help="A stage that makes a model; else the last one.")] = "",
    file: File = "",
) -> None:
    """Talk to a model in the terminal."""
    from nanodag.cli.use import chat_with

    chat_with(run, stage, file=file)


@app.command()
def report(run: RunName = "", file: File = "") -> None:
    """Print a run's report and where its files lie."""
    from nanodag.cli.use import show_report

    show_report(run, file=file)


@app.command()
def rollouts(
    run: RunName = "",
    stage: Annotated[str, typer.Argument(help="An RL stage; else the last one that has begun.")] = "",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 for any that is free.")] = 0,
    file: File = "",
) -> None:
    """Open a local page on which a run's rollouts can be read, token by token. Ctrl-C ends it."""
    from nanodag.cli.use import show_rollouts

    show_rollouts(run, stage, port=port, file=file)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(
    context: typer.Context,
    slow: Annotated[bool, typer.Option("--slow", help="The tests that take minutes, too.")] = False,
) -> None:
    """Run the test suite; what else is given goes to pytest."""
    from nanodag.cli.use import run_tests

    raise typer.Exit(run_tests(slow=slow, arguments=context.args))


@server_app.command("start")
def server_start(file: File = "", preset: Preset = "auto") -> None:
    """Start the server, when it is not up, and print its address."""
    from nanodag.cli.use import start_server

    start_server(file=file, preset=preset)


@server_app.command("stop")
def server_stop(file: File = "", preset: Preset = "auto") -> None:
    """End the server and whatever it carries out; the store keeps what is resumable."""
    from nanodag.cli.use import stop_server

    stop_server(file=file, preset=preset)


@server_app.command("status")
def server_status(file: File = "", preset: Preset = "auto") -> None:
    """Say whether the server is up. Exit code 0 when it is, 3 when it is not."""
    from nanodag.cli.use import server_is_up

    raise typer.Exit(0 if server_is_up(file=file, preset=preset) else 3)


store_commands.add_to(app)


def main() -> None:
    """Run the command; an error raised on purpose becomes its message and an exit code (2: wrong config)."""

    try:
        app(said.take(sys.argv[1:]))
    except NanodagError as error:
        typer.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
