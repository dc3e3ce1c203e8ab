"""Killed while it starts Prefect, a command leaves what the next start heals by itself: one server and one process that
serves, no flow run that nobody runs; and `nanodag server stop` leaves nothing."""

import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from nanodag.server.prefect_api import FINAL_STATES, Api
from tests.fault.processes import wait_until
from tests.fault.project import STAGES, Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MOMENTS_S = 50.0  # after the first process is there
VICTIMS = ("flows.prefect_server", "nanodag.worker.respawn", "flows.serve", "all", "tokenizer")
TIMEOUT_S = 600.0

# The command, killed by itself at step KILL_AT.
COMMAND = """
import os, signal, sys
import nanodag.cli.run, nanodag.server.local_server as server
from nanodag.server.prefect_api import Api
left = [int(os.environ["KILL_AT"])]
def step():
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
def stepping(owner, name):
    does = getattr(owner, name)
    def stepped(*args, **options):
        step()
        found = does(*args, **options)
        step()
        return found
    setattr(owner, name, stepped)
for owner, name in (
    (server, "write_json"), (server, "process_started"), (server, "start_child"),
    (server.LocalServer, "_end_strays"), (server.LocalServer, "_serve"), (server.LocalServer, "_ready"),
    (Api, "create_run"), (Api, "num_active_runs"),
):
    stepping(owner, name)
from nanodag.cli import main
main()
"""


def _cmdline(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _below(folder: Path) -> list[psutil.Process]:
    """The processes that belong to a project: those whose working directory lies below its folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_below = Path(process.cwd()).is_relative_to(folder / "store")
            if is_below and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture
def project(tmp_path):
    made = Project(tmp_path / "project", stages={"tokenizer": STAGES["tokenizer"]})
    yield made
    made.run("server", "stop", timeout_s=TIMEOUT_S)
    left = _below(made.folder)
    for process in left:
        process.kill()
    assert not left, f"server stop left {left}"


def kill_at_step(project, step):
    """Have the command kill itself before or after one of the calls that start, end or record something."""
    process = project.command("run", "--name", "first", "--detach", code=COMMAND, KILL_AT=str(step))
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode in (0, -signal.SIGKILL), f"the command was not killed but failed: {output}"


def kill_at_moment(project, seed):
    """Kill Prefect's server, the supervisor, its child, a flow or all of them at a random moment."""
    source = random.Random(seed)
    victim, after_s = source.choice(VICTIMS), source.uniform(0.0, MOMENTS_S)
    process = project.command("run", "--name", "first", "--detach")
    wait_until(lambda: process.poll() is not None or _below(project.folder), TIMEOUT_S)
    time.sleep(after_s)
    doomed = [p for p in _below(project.folder) if victim == "all" or victim in " ".join(_cmdline(p))]
    for one in [*doomed, process] if victim == "all" else doomed:
        with suppress(psutil.Error):
            one.kill()
    process.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize(("kill", "number"), [(kill_at_step, 7), (kill_at_moment, 4), (kill_at_moment, 8)])
def test_a_start_that_was_killed_heals_by_itself(project, kill, number):
    kill(project, number)
    project.done("run", "--name", "second", timeout_s=TIMEOUT_S)
    found = project.server()
    assert set(found["deployments"]) >= {"speedrun", "run_stage"}
    modules = {"flows.prefect_server", "nanodag.worker.respawn"}
    firsts = [p.pid for p in _below(project.folder) if {*_cmdline(p)} & modules]
    assert sorted(firsts) == sorted([found["server"]["pid"], found["serve"]["pid"]])
    api = Api(f"http://127.0.0.1:{found['port']}")

    def have_ended():
        runs = [run for run in api.ask("POST", "/flow_runs/filter", {}) if not run["auto_scheduled"]]  # nights to come
        return all(run["state"]["type"] in FINAL_STATES for run in runs)

    wait_until(have_ended, 180, every_s=0.5)  # what loses process and runner is marked after 90 s
