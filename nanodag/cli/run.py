"""`nanodag run`: refuse a wrong config, bring the server up, start the flow, show how it goes."""

import contextlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from nanodag.children.tree import send
from nanodag.cli.live_table import STYLES, LiveTable, make_console, stage_table
from nanodag.cli.parameters import command
from nanodag.cli.show import how_to_build_stale, print_stale, print_summary, print_warnings
from nanodag.config import Pipeline, Resolved, resolve
from nanodag.config.kind import MODEL, PAGE
from nanodag.config.kinds import find_kind, recorded_kind
from nanodag.config.resolve import portable, read_document
from nanodag.errors import ServerError, StoreBusy
from nanodag.errors.words import counted, duration
from nanodag.host.machine import machine_of
from nanodag.run.progress import progress_of
from nanodag.run.python_path import note_python_path
from nanodag.run.record import check_gpus, locations_of, merged, pipeline_file, refuse_composed, store_of, unfinished
from nanodag.run.stale_stages import left_alone
from nanodag.server.local_server import LocalServer, RunningServer, server_of
from nanodag.server.prefect_api import FINAL_STATES, Api
from nanodag.store import Store
from nanodag.store.run_record import RunRecord

STOP_TIMEOUT_S = 90.0
LOST_AFTER_S = 10.0
STOPPED_EXIT_CODE = 130


def run_pipeline(
    overrides: Sequence[str], *, preset: str, file: str, name: str, detach: bool, stale: bool = False
) -> tuple[Store, str, int]:
    """Run a pipeline; returns store, name and exit code, 0 only when it completed. stale: build stale stages again."""
    began = time.monotonic()
    console = make_console()
    machine = None
    if (before := known_run(name, overrides, file=file)) is not None:
        # Go on with that run: what it was told before, and is told now.
        file, preset = file or before.file, before.preset if preset == "auto" else preset
        overrides = merged([*before.overrides, *overrides])
        machine = machine_of(before.machine)
    path = pipeline_file(file)
    resolved = resolve(path, preset, overrides, machine=machine)
    pipeline = resolved.pipeline
    store = store_of(pipeline)
    name = name or f"{pipeline.preset}-{time.strftime('%m%d-%H%M%S')}"
    server = server_of(pipeline, store, path)
    take_over(store, name, server, console)
    check_gpus(name, resolved, list(pipeline.stages), store.find_run(name))
    to_build = unfinished(pipeline, store.find_run(name))
    from nanodag.run.preflight import check_before_start  # numpy and more, which other commands of a run do without

    check_before_start(pipeline, store, file=path, to_build=to_build)
    note_python_path(store.local, name)
    num_stages = counted(len(pipeline.stages), "stage")
    console.print(f"Run [bold]{name}[/]: preset {pipeline.preset}, {num_stages}, store {store.url}")
    print_placement(console, resolved)
    print_warnings(console, resolved.warnings)
    if preset == "auto" and machine is None and resolved.machine.num_gpus:
        console.print("No preset was named, so this is the file's default. There are:", style="dim")
        for other, stated in read_document(path)["presets"].items():
            console.print(f"  {other}: {stated.get('description', '')}", style="dim", markup=False)
    kept = choose_stale(console, store.find_run(name), pipeline, build=stale, may_ask=sys.stdin.isatty())
    parameters = {**parameters_of(path, pipeline, store, overrides), "stale": kept}
    return store, name, start(store, server, name, parameters, detach=detach, began=began)


def known_run(name: str, overrides: Sequence[str], *, file: str) -> RunRecord | None:
    """The record of a run of this user's, looked up in its store before its preset is known; None for a new run.
    Raises ConfigError for a sweep or a night."""
    of_store = [text for text in overrides if text.startswith("store")]
    store = store_of(resolve(pipeline_file(file), overrides=of_store).pipeline) if name else None
    if store is None or store.find_run(name) is None:
        return None
    record = store.own_run(name)
    refuse_composed(name, record)
    return record


def settings(overrides: Sequence[str] | None, *, preset: str, file: str) -> tuple[Path, Pipeline, Store]:
    """The pipeline file, what it says, and its store."""
    path = pipeline_file(file)
    pipeline = resolve(path, preset, overrides or ()).pipeline
    return path, pipeline, store_of(pipeline)


def ensured(server: LocalServer) -> RunningServer:
    """The running server, brought up where it is not, which is said."""
    return server.ensure(partial(make_console().print, style="dim"))


def parameters_of(path: Path, pipeline: Pipeline, store: Store, overrides: Sequence[str] | None) -> dict[str, Any]:
    """A flow run's parameters: the flow's process has another environment and working directory, so it is told all that
    came from these."""
    all_overrides = merged([*portable(overrides or ()), *locations_of(pipeline, store)])
    return {"preset": pipeline.preset, "overrides": all_overrides, "file": str(path)}


def serve(
    path: Path, pipeline: Pipeline, store: Store, overrides: Sequence[str] | None
) -> tuple[RunningServer, dict[str, Any]]:
    """The running server, and a flow run's parameters."""
    return ensured(server_of(pipeline, store, path)), parameters_of(path, pipeline, store, overrides)


def start_and_watch(
    title: str, store: Store, running: RunningServer, flow: str, name: str, parameters: dict[str, Any], *, detach: bool
) -> int | None:
    """Start the flow run of a night or sweep and show it until it ends; Ctrl-C leaves it to go on. Returns the
    command's exit code, None when detached."""
    console, api = make_console(), running.api()
    note_python_path(store.local, name)
    flow_run = api.create_run(running.deployments[flow], name=name, parameters={"name": name, **parameters})
    console.print(f"{title} [bold]{name}[/]: {running.url}/runs/flow-run/{flow_run}")
    if detach:
        return None
    with LiveTable(console, store) as watch:
        while (state := api.run_state(flow_run))["type"] not in FINAL_STATES:
            watch.show(store.find_run(name), state)
            time.sleep(0.3)
        watch.show(store.find_run(name), state)
    console.print(f"{state['name']}: {state['message']}", markup=False, highlight=False)
    return 0 if state["type"] == "COMPLETED" else 1


def print_placement(console: Console, resolved: Resolved) -> None:
    """Print the GPUs, or ranks and threads, that each stage that trains takes."""
    taken: dict[str, list[str]] = {}
    for name, stage in resolved.pipeline.stages.items():
        resources = stage.resources
        if not find_kind(stage.kind).trains or resources.work_pool != "none":
            continue
        ranks, threads = int(resources.num_ranks), counted(int(resources.threads), "thread")
        what = counted(ranks, "GPU") if resources.device == "cuda" else f"{counted(ranks, 'rank')} of {threads}"
        taken.setdefault(what, []).append(name)
    if taken:
        text = "; ".join(f"{', '.join(names)} on {what}" for what, names in taken.items())
        console.print(f"Machine {resolved.machine.short}: {text}", style="dim", markup=False, highlight=False)


def take_over(store: Store, name: str, server: LocalServer, console: Console) -> None:
    """Return when no process executes that run; one that is about to end, as after Ctrl-C, is waited for. One whose
    Prefect server has died is asked to end, and leaves checkpoints: nobody could follow or cancel it any more.

    Raises StoreBusy when a process that is alive runs it.
    """
    deadline, has_said = time.monotonic() + STOP_TIMEOUT_S, False
    while (before := store.find_run(name)) is not None and before.is_alive:
        why = _why_it_ends(server, before)
        if time.monotonic() > deadline or not why:
            raise StoreBusy(f"Run {name} is under way in process {before.pid}; wait for it, or stop it.")
        if not has_said:
            text = f"Run {name} {why}; waiting for its process {before.pid} to end, {STOP_TIMEOUT_S:.0f} s at most ..."
            console.print(text, style="dim")
            has_said = True
            if server.has_left_flows():
                send(before.pid, signal.SIGTERM)
        time.sleep(0.2)


def _why_it_ends(server: LocalServer, record: RunRecord) -> str:
    """Reason for which the process of a record is about to end, though it is alive; empty where it is not."""
    if not record.flow_run:
        return ""
    if (running := server.running()) is None:
        return "has lost its Prefect server"
    is_ending = running.api().run_state(record.flow_run)["type"] in ("CANCELLING", *FINAL_STATES)
    return "is still being stopped" if is_ending else ""


def choose_stale(console: Console, record: RunRecord | None, pipeline: Pipeline, *, build: bool, may_ask: bool) -> str:
    """`build` or `keep`: what becomes of the stale stages of a run that is resumed (nanodag.run.stale_stages). Says
    which these are and what they took when they were built; asks where that is possible, and keeps them otherwise.

    record: the run's, None for a new one. build: that was asked for already.
    """
    stale = left_alone(record, pipeline) if record is not None else {}
    if record is None or not stale:
        return "keep"
    console.print(f"Of run {record.run} these stages are finished, but stale:", style=STYLES["stale"])
    for stage, why in stale.items():
        made = record.stages[stage].made
        took = duration(made.cost_of("seconds")) if made is not None else ""
        console.print(f"  {stage}: {why}" + (f"; it took {took} when it was built" if took else ""), markup=False)
    if not build and may_ask:
        console.print("Build them again? [y/N] ", end="", markup=False)
        with contextlib.suppress(EOFError):  # Ctrl-D is no yes
            build = input().strip().lower() in ("y", "yes")
    if build:
        console.print("They are built again.")
        return "build"
    console.print(f"They stay as they are. To build them again: {how_to_build_stale(record.run)}", markup=False)
    return "keep"


def start(
    store: Store, server: LocalServer, name: str, parameters: Mapping[str, Any], *, detach: bool, began: float
) -> int:
    """Start a flow run of a run, of one stage where `parameters` name one, and show it until it ends, unless detached;
    returns the command's exit code. began: when the command did, by time.monotonic."""
    console, running = make_console(), ensured(server)
    api, stage = running.api(), parameters.get("stage", "")
    bury_the_dead(api, store)
    deployment = running.deployments["run_stage" if stage else "speedrun"]
    flow_name = f"{name}-{stage}" if stage else name
    flow_run = api.create_run(deployment, name=flow_name, parameters={"name": name, **parameters})
    console.print(f"Prefect UI: {running.url}/runs/flow-run/{flow_run}")
    console.print(f"As a page: {command(f'report {name} --follow')}", markup=False, highlight=False)
    if detach:
        console.print(f"It goes on without this terminal; look with: {command(f'stages {name}')}")
        return 0
    code = _Attended(console, store, api, server, name, flow_run).wait()
    end = command("server stop")
    console.print(f"{duration(time.monotonic() - began)} in all. The UI stays up; end it with: {end}")
    return code


class _Attended:
    def __init__(self, console: Console, store: Store, api: Api, server: LocalServer, name: str, flow_run: str) -> None:
        self._console, self._store, self._api, self._server = console, store, api, server
        self._name, self._flow_run = name, flow_run
        self._missing_since = 0.0

    def wait(self) -> int:
        """Show the run until it ends, or stop it when asked to; returns the command's exit code."""
        handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # it raises KeyboardInterrupt
        try:
            with LiveTable(self._console, self._store) as watch:
                while True:
                    state = self._state()
                    watch.show(self._record(), state)
                    if state["type"] in FINAL_STATES:
                        break
                    time.sleep(0.3)
        except KeyboardInterrupt:
            self._stop()
            return STOPPED_EXIT_CODE
        except ServerError as error:
            self._console.print(f"[red]{error}[/]")
            self._tell_how_to_resume()
            return 1
        finally:
            signal.signal(signal.SIGTERM, handler)
        return self._tell_end(state)

    def _state(self) -> dict[str, str]:
        """The flow run's state; CRASHED when nobody is left who could change it. Raises ServerError when the server is
        gone for LOST_AFTER_S."""
        record = self._record()
        try:
            state = self._api.run_state(self._flow_run)
        except ServerError:
            if self._lost_for() > LOST_AFTER_S:
                raise
            return {"type": "UNKNOWN", "name": "the server does not answer", "message": ""}
        is_lost = not self._server.serves() or (
            state["type"] == "RUNNING" and record is not None and not record.is_alive
        )
        if state["type"] in FINAL_STATES or not is_lost:
            self._missing_since = 0.0
        elif self._lost_for() > LOST_AFTER_S:
            self._api.set_state(self._flow_run, "CRASHED", "The flow's process is gone.")
            return self._api.run_state(self._flow_run)
        return state

    def _lost_for(self) -> float:
        self._missing_since = self._missing_since or time.monotonic()
        return time.monotonic() - self._missing_since

    def _stop(self) -> None:
        self._console.print("Stopping: workers write a checkpoint and end. Ctrl-C again leaves without waiting.")
        deadline = time.monotonic() + STOP_TIMEOUT_S
        try:
            self._api.set_state(self._flow_run, "CANCELLING", "Stopped in the terminal.")
            while time.monotonic() < deadline:
                has_ended = self._api.run_state(self._flow_run)["type"] in FINAL_STATES
                if has_ended and ((record := self._record()) is None or not record.is_alive):
                    break
                time.sleep(0.2)
        except (KeyboardInterrupt, ServerError) as error:
            self._console.print(f"Left; it may still be stopping. {error}".rstrip())
        if (record := self._record()) is not None:
            self._console.print(stage_table(progress_of(self._store, record), self._console))
        self._tell_how_to_resume()

    def _tell_end(self, state: dict[str, str]) -> int:
        record = self._record()
        if record is not None:
            print_stale(self._console, record)
            print_summary(self._console, self._store, record)
        if state["type"] == "COMPLETED":
            self._console.print(f"[green]Completed[/]: {state['message']}")
            kinds = [recorded_kind(e.kind) for e in record.stages.values()] if record is not None else []
            makes, has_rollouts = {kind.makes for kind in kinds}, any(kind.config.makes_rollouts for kind in kinds)
            nexts = [f"report {self._name}"] * (PAGE in makes) + [f"chat {self._name} --web"] * (MODEL in makes)
            for arguments in nexts + [f"rollouts {self._name}"] * has_rollouts:
                self._console.print(f"Next: {command(arguments)}")
            return 0
        self._console.print(f"[red]{state['name']}[/]", highlight=False)
        self._console.print(state["message"], highlight=False, markup=False)
        self._tell_how_to_resume()
        return 1

    def _tell_how_to_resume(self) -> None:
        resume = command(f"run --name {self._name}")
        self._console.print(f"What is finished is in the store. Resume it with: {resume}")

    def _record(self) -> RunRecord | None:
        """The run's record; None before the flow run has begun it."""
        record = self._store.find_run(self._name)
        return record if record is not None and record.flow_run == self._flow_run else None


def bury_the_dead(api: Api, store: Store) -> None:
    """Say of runs whose process was killed together with its runner that they crashed: nobody else would."""
    for name, record in store.records_of_runs().items():
        if not record.is_gone:
            continue
        now = store.change_run(name, lambda r: r.changed(state="interrupted") if r.is_gone else r)
        try:  # one that was resumed meanwhile lives, and one that waits was resumed in the UI
            is_dead = bool(record.flow_run) and now.state == "interrupted"
            if is_dead and api.run_state(record.flow_run)["type"] in ("RUNNING", "CANCELLING"):
                api.set_state(record.flow_run, "CRASHED", "The flow's process is gone.")
        except ServerError:  # another server's, or deleted in the UI
            continue
