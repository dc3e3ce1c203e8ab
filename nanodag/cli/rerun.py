"""`nanodag rerun`. Light: it imports what it needs when it runs."""

from typing import Annotated

import typer

from nanodag.cli.parameters import Detach, File, Overrides, ThisRun
from nanodag.errors import ConfigError


def rerun(
    run: ThisRun,
    overrides: Overrides = None,
    stage: Annotated[str, typer.Option("--stage", "-s", metavar="STAGE", help="That stage alone.")] = "",
    begin_at: Annotated[str, typer.Option("--from", metavar="STAGE", help="That stage and all that follow it.")] = "",
    stale: Annotated[bool, typer.Option("--stale", help="What stands on a result that was built again since.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Build again though the store has it.")] = False,
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
    import time

    from nanodag.cli.live_table import make_console
    from nanodag.cli.run import start, take_over
    from nanodag.cli.show import find_run, print_warnings
    from nanodag.config import resolve
    from nanodag.config.resolve import portable
    from nanodag.run.preflight import check_before_start
    from nanodag.run.python_path import note_python_path
    from nanodag.run.record import check_gpus, pipeline_file, recorded_run, served_store
    from nanodag.server.local_server import server_of

    began, console, changes = time.monotonic(), make_console(), portable(overrides or [])
    store = served_store(file)
    name = find_run(store, run).run
    recorded = recorded_run(store, name, stage=stage, begin_at=begin_at, stale=stale, overrides=changes)
    path = pipeline_file(recorded.file)
    resolved = resolve(path, recorded.preset, recorded.overrides, machine=recorded.machine)
    pipeline = resolved.pipeline
    server = server_of(pipeline, store, path)
    take_over(store, name, server, console)
    check_gpus(name, resolved, recorded.stages, None)
    check_before_start(pipeline, file=path, remembered=store.local / "checked", stages=recorded.stages)
    note_python_path(store.local, name)
    console.print(f"Run [bold]{name}[/]: {', '.join(recorded.stages)} again; store {store.url}")
    print_warnings(console, resolved)
    which = {"stage": stage} if stage else {"stale": "only"} if stale else {"begin_at": begin_at}
    parameters = {"overrides": changes, "force": force, **which}
    raise typer.Exit(start(store, server, name, parameters, detach=detach, began=began))
