"""Kills what starts Prefect, at each step and at random moments, and looks whether the next start heals it.

    python -m tests.fault.kill_starts --runs 100 --jobs 4            # light stand-ins for Prefect's two processes
    python -m tests.fault.kill_starts --runs 20 --jobs 2 --real      # Prefect, and a flow of one fake stage

Odd runs kill the command itself, at one step after the other: before and after every call that starts, ends or records
something. Even ones kill Prefect's server, the supervisor, its child, a flow or all of them at a random moment. Then
the same is asked for again. It must come up by itself, as one server and one process that serves; no flow run may be
left that nobody runs; and `nanodag server stop` must leave nothing. Prints a line a run; exit code 1 when one
failed.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from nanodag.server.prefect_api import FINAL_STATES, Api
from tests.fault.project import FAKES, STAGES, Project

LIGHT = Path(__file__).parent / "light"
STEPS = {False: 26, True: 40}  # of a start; a number beyond its last step kills nothing
MOMENTS_S = {False: 4.0, True: 50.0}  # after the first process is there
VICTIMS = ("flows.prefect_server", "nanodag.worker.respawn", "flows.serve", "all")
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


@dataclass
class Trial:
    """One run. number: which step or moment."""

    number: int
    is_real: bool
    folder: Path

    def __call__(self) -> str:
        """What was killed. Raises AssertionError when the next start did not heal it."""
        source = random.Random(self.number)
        paths = [FAKES] if self.is_real else [LIGHT, FAKES]
        stages = {"tokenizer": STAGES["tokenizer"]}
        project = Project(self.folder, stages=stages, PYTHONPATH=":".join(map(str, paths)))
        try:
            killed = self._kill(project, source)
            return killed + self._heal(project)
        finally:
            project.run("server", "stop", timeout_s=TIMEOUT_S)
            left = _below(self.folder)
            for process in left:
                process.kill()
            assert not left, f"server stop left {left}"

    def _asked(self, name: str) -> list[str]:
        return ["run", "--name", name] if self.is_real else ["server", "start"]

    def _kill(self, project: Project, source: random.Random) -> str:
        begin = [*self._asked("first"), *(["--detach"] if self.is_real else [])]
        if self.number % 2:
            at = 1 + self.number // 2 % STEPS[self.is_real]
            process = project.command(*begin, code=COMMAND, KILL_AT=str(at))
            output, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode in (0, -signal.SIGKILL), f"the command was not killed but failed: {output}"
            return f"the command at step {at} ({'killed' if process.returncode == -signal.SIGKILL else 'it was over'})"
        victim = source.choice((*VICTIMS, "tokenizer") if self.is_real else VICTIMS)
        process, after_s = project.command(*begin), source.uniform(0.0, MOMENTS_S[self.is_real])
        while process.poll() is None and not _below(self.folder):
            time.sleep(0.01)
        time.sleep(after_s)
        doomed = [p for p in _below(self.folder) if victim == "all" or victim in " ".join(_cmdline(p))]
        for one in [*doomed, process] if victim == "all" else doomed:
            with suppress(psutil.Error):
                one.kill()
        process.communicate(timeout=TIMEOUT_S)
        return f"{victim} after {after_s:.1f} s ({len(doomed)} processes)"

    def _heal(self, project: Project) -> str:
        began = time.monotonic()
        code, output = project.run(*self._asked("second"), timeout_s=TIMEOUT_S)
        assert code == 0, output
        took_s = time.monotonic() - began
        found = project.server()
        assert set(found["deployments"]) >= {"speedrun", "run_stage"}
        modules = {"flows.prefect_server", "nanodag.worker.respawn"}
        firsts = [p.pid for p in _below(self.folder) if {*_cmdline(p)} & modules]
        assert sorted(firsts) == sorted([found["server"]["pid"], found["serve"]["pid"]])
        if self.is_real:
            self._wait_for_ends(Api(f"http://127.0.0.1:{found['port']}"))
        return f"; again in {took_s:.0f} s"

    def _wait_for_ends(self, api: Api) -> None:
        deadline = time.monotonic() + 180  # what loses process and runner is marked after 90 s
        while True:
            runs = api.ask("POST", "/flow_runs/filter", {})
            states = {run["name"]: run["state"] for run in runs if not run["auto_scheduled"]}  # nights to come
            open_ones = {name: state["name"] for name, state in states.items() if state["type"] not in FINAL_STATES}
            if not open_ones:
                return
            assert time.monotonic() < deadline, f"without an end: {open_ones}"
            time.sleep(0.5)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--real", action="store_true")
    given = parser.parse_args()
    num_failed = 0

    def tried(number: int) -> bool:
        folder = Path(tempfile.mkdtemp(prefix=f"kill-starts-{number}-")).resolve()
        try:
            print(f"{number:4d} ok      {Trial(number, given.real, folder / 'project')()}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            return True
        except Exception as error:  # noqa: BLE001 - the others are tried all the same
            print(f"{number:4d} FAILED  {folder}: {type(error).__name__}: {error}", flush=True)
            return False

    with ThreadPoolExecutor(given.jobs) as pool:
        num_failed = sum(not ok for ok in pool.map(tried, range(given.first, given.first + given.runs)))
    print(f"{given.runs - num_failed} of {given.runs} healed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
