"""`nanodag chat`, `report`, `test` and `server`."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.markdown import Markdown

from nanodag.cli import store_options
from nanodag.cli.live_table import make_console
from nanodag.cli.serve import found_model
from nanodag.cli.show import find_run, print_stale
from nanodag.config import resolve
from nanodag.config.kind import PAGE
from nanodag.config.kinds import recorded_kind
from nanodag.errors import ArtifactNotFound, MissingTool
from nanodag.host.folders import PROJECT
from nanodag.host.machine import detect
from nanodag.host.processor import usable_cores
from nanodag.run.record import pipeline_file, store_of
from nanodag.server.local_server import LocalServer, server_of
from nanodag.store import Store
from nanodag.store.run_record import RunRecord
from nanodag.worker.launch import worker_environment

MAX_TEST_WORKERS = 4  # each takes 3 GB with what its tests start


def chat_with(name: str, stage: str, *, file: str, options: Sequence[str] = ()) -> NoReturn:
    """Hand over to the chat program with the model of a run's stage, the last one there is unless named; with a folder,
    or a model of the hub. options: of the program."""
    _, folder = found_model(name, stage, file)
    environment = worker_environment(usable_cores(), device=detect().device)
    command = [sys.executable, "-m", "nanodag.chat", str(folder), *options]
    # In this process's place, not as its child: Ctrl-C ends an answer, and must not end a parent that waits.
    os.execve(sys.executable, command, environment)


def show_report(name: str, *, file: str) -> None:
    """Print report.md, then where it and the HTML lie."""
    console = make_console()
    store = store_of(resolve(pipeline_file(file)).pipeline)
    record = find_run(store, name)
    reports = _made(record, PAGE)
    if not reports:
        raise ArtifactNotFound(
            f"Run {record.run} has no report yet; see how far it is with: "
            + store_options.command(f"stages {record.run}")
        )
    folder = _files_of(store, record, reports[-1])
    console.print(Markdown((folder / "report.md").read_text()))
    print_stale(console, record, reports[-1])
    for path in sorted(folder.glob("report.*")):
        console.print(str(path), soft_wrap=True, highlight=False)


def _made(record: RunRecord, product: str) -> list[str]:
    """The finished stages whose kind makes such a thing."""
    entries = record.stages.items()
    return [stage for stage, entry in entries if entry.has_ended_well and recorded_kind(entry.kind).makes == product]


def _files_of(store: Store, record: RunRecord, stage: str) -> Path:
    return store.materialize(store.get(f"{record.run}:{stage}"))


def run_tests(*, slow: bool, arguments: Sequence[str]) -> int:
    """Run pytest over the checkout's tests; returns its exit code."""
    if not (PROJECT / "tests").is_dir():
        raise MissingTool(f"{PROJECT} has no tests; they come with a checkout of the project, not with a package.")
    selection = [] if slow else ["-m", "not slow"]
    # A file's tests stay together, for what they share. tests/conftest.py says what begins first.
    beside = ["-n", str(min(usable_cores(), MAX_TEST_WORKERS)), "--dist", "loadfile", "--no-loadscope-reorder"]
    command = [sys.executable, "-m", "pytest", *beside, *selection, *arguments]
    return subprocess.run(command, cwd=PROJECT, check=False).returncode


def _server(overrides: Sequence[str], file: str, preset: str) -> LocalServer:
    path = pipeline_file(file)
    pipeline = resolve(path, preset, overrides).pipeline
    return server_of(pipeline, store_of(pipeline), path)


def start_server(overrides: Sequence[str], *, file: str, preset: str) -> None:
    """Bring the server up and print its address."""
    console = make_console()
    running = _server(overrides, file, preset).ensure(lambda text: console.print(text, style="dim"))
    console.print(f"Prefect UI: {running.url}")


def stop_server(overrides: Sequence[str], *, file: str, preset: str) -> None:
    """End the server and what it runs."""
    was_up = _server(overrides, file, preset).stop()
    make_console().print("The Prefect server has ended." if was_up else "No Prefect server was up.")


def server_is_up(overrides: Sequence[str], *, file: str, preset: str) -> bool:
    """Print where the server is; True when it is up."""
    running, start = _server(overrides, file, preset).running(), store_options.command("server start")
    make_console().print(f"Prefect UI: {running.url}" if running else f"No Prefect server is up. Start it: {start}")
    return running is not None
