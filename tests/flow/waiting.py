"""Waiting for a stage that another thread or process runs."""

import time

from tests.fault.processes import wait_until


def wait_for_step(run, stage, step, of="r"):
    wait_until(lambda: of in run.store.runs())
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        workspace = run.store.read_run(of).stages[stage].workspace
        path = run.store.local / "work" / (workspace or "none").rpartition("/")[2] / "metrics.jsonl"
        if path.exists() and f'"step": {step}' in path.read_text():
            return path.parent
        time.sleep(0.02)
    raise AssertionError("the stage did not get that far")
