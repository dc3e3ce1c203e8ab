"""`nanodag rerun`: one stage of a run again, one and all that follow it, or what is stale; with other values where
wanted."""

from collections.abc import Sequence

from nanodag.cli.live_table import make_console
from nanodag.cli.run import bury_the_dead, follow, take_over
from nanodag.cli.show import find_run, print_warnings
from nanodag.config import resolve
from nanodag.config.resolve import portable
from nanodag.errors import ConfigError
from nanodag.run.preflight import check_before_start
from nanodag.run.python_path import note_python_path
from nanodag.run.record import check_gpus, pipeline_file, recorded_run, store_of
from nanodag.server.local_server import server_of


def rerun(
    overrides: Sequence[str],
    *,
    run: str,
    stage: str,
    begin_at: str,
    stale: bool,
    force: bool,
    file: str,
    detach: bool,
) -> int:
    """Run a stage of a run, one and what follows it, or what is stale, and return the command's exit code.

    stage, begin_at or stale: exactly one of them. What comes before is taken as the run's record says.

    Raises ConfigError for a stage that the run does not have, an override of another one, or a wrong value.
    """
    if bool(stage) + bool(begin_at) + stale != 1:
        raise ConfigError(
            "Say either --stage STAGE, for that stage alone, --from STAGE, for it and what follows it, or --stale, for "
            "what is stale."
        )
    console = make_console()
    store = store_of(resolve(pipeline_file(file)).pipeline)
    name = find_run(store, run).run
    recorded = recorded_run(store, name, stage=stage, begin_at=begin_at, stale=stale, overrides=portable(overrides))
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
    running = server.ensure(lambda text: console.print(text, style="dim"))
    api = running.api()
    bury_the_dead(api, store)
    parameters = {"name": name, "overrides": portable(overrides), "force": force}
    if stage:
        flow_run = api.create_run(
            running.deployments["run_stage"], name=f"{name}-{stage}", parameters={**parameters, "stage": stage}
        )
    else:
        which = {"stale": "only"} if stale else {"begin_at": begin_at}
        flow_run = api.create_run(running.deployments["speedrun"], name=name, parameters={**parameters, **which})
    return follow(console, store, server, running, name, flow_run, detach=detach)
