"""From Retry to the first new step, and what an idle server takes: `python -m benchmarks.retry [--preset pocket]`.

A run is begun in a store of its own, cancelled in the middle of pretraining, and retried as the UI's button does it.
Printed for each retry: seconds from the click until metrics.jsonl has the step after the newest checkpoint. Then the
memory that the server and the process that serves hold while nothing is under way (PSS: what they share counts once).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil

from nanodag.config import resolve
from nanodag.run.record import pipeline_file, store_of
from nanodag.server.local_server import RunningServer, server_of
from nanodag.server.prefect_api import FINAL_STATES, Api
from nanodag.store import Store

STAGE = "pretrain"
STEPS_BETWEEN = 30
IDLE_S = 20.0


def nanodag(*arguments: str) -> None:
    """The command as a user starts it."""
    subprocess.run([sys.executable, "-c", "from nanodag.cli import main; main()", *arguments], check=True)


def last_step(store: Store, run: str) -> int:
    """The last step that the stage of a run has written, 0 before the first."""
    key = store.read_run(run).stages[STAGE].key
    path = store.local / "work" / (key or "none") / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((_step(line) for line in lines if line.endswith("\n")), default=0)


def _step(line: str) -> int:
    found: dict[str, Any] = json.loads(line)
    return int(found["step"]) if found["event"] == "step" else 0


def wait_until(is_so: Any, *, poll_s: float = 0.05) -> float:
    """Seconds until it is so."""
    began = time.monotonic()
    while not is_so():
        time.sleep(poll_s)
    return time.monotonic() - began


def retried(api: Api, store: Store, run: str) -> float:
    """Cancel the run after some more steps, retry it; seconds from there to the next new step."""
    flow_run, first = store.read_run(run).flow_run, last_step(store, run)
    wait_until(lambda: last_step(store, run) >= first + STEPS_BETWEEN)
    api.set_state(flow_run, "CANCELLING", "benchmark")
    wait_until(lambda: api.run_state(flow_run)["type"] in FINAL_STATES)
    before = last_step(store, run)
    api.set_state(flow_run, "SCHEDULED", "benchmark", name="AwaitingRetry")
    return wait_until(lambda: last_step(store, run) > before)


def memory_mb(running: RunningServer) -> dict[str, float]:
    """MB (10^6 bytes, PSS) of the server's processes and of those that serve."""
    found = {}
    for name, process in (("server", running.server), ("serve", running.serve)):
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        found[name] = sum(one.memory_full_info().pss for one in family) / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="pocket")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["NANODAG_STORE"] = name
        nanodag("run", "--preset", options.preset, "--name", "retried", "--detach", f"{STAGE}.log_every=1")
        path = pipeline_file("")
        pipeline = resolve(path, options.preset).pipeline
        store = store_of(pipeline)
        server = server_of(pipeline, store, path)
        running = server.running()
        assert running is not None
        try:
            wait_until(lambda: "retried" in store.runs())
            for _ in range(options.repeats):
                print(f"Retry to the first new step: {retried(running.api(), store, 'retried'):.1f} s", flush=True)
            flow_run = store.read_run("retried").flow_run
            running.api().set_state(flow_run, "CANCELLING", "benchmark")
            wait_until(lambda: running.api().run_state(flow_run)["type"] in FINAL_STATES)
            time.sleep(IDLE_S)
            found = memory_mb(running)
            print(
                f"idle: {', '.join(f'{k} {v:.0f} MB' for k, v in found.items())}, {sum(found.values()):.0f} MB in all"
            )
        finally:
            server.stop()


if __name__ == "__main__":
    main()
