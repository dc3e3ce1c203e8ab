"""A stage that takes milliseconds: counts to `max_steps` with a checkpoint a step, and writes what it was given.

What it does beside that is said by files in the folder FAKE_ORDERS, one a stage, each holding one order:
    fail            raise                       fail-late       raise after step 2
    wait            count no further than 2 until told otherwise
    hold            as wait, deaf to SIGTERM    orphan          leave a child in a session of its own
    measure LOSS    validate a step, and give the sweep a second to end it at step 2
    raise MODULE:CLASS MESSAGE                  once MODULE:CLASS MESSAGE       the same, the first time only
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from nanodag.store import Checkpoints
from nanodag.worker.job import MetricsLog, finish, leave_stopped, load_job, stop_requested

NUM_STEPS = 4


def order(name: str) -> str:
    path = Path(os.environ["FAKE_ORDERS"]) / name
    return path.read_text().strip() if path.exists() else ""


def raise_as_told(name: str) -> None:
    do, _, what = order(name).partition(" ")
    if do in ("raise", "once"):
        if do == "once":
            (Path(os.environ["FAKE_ORDERS"]) / name).write_text("")
        error, _, message = what.partition(" ")
        module, _, kind = error.partition(":")
        raise getattr(importlib.import_module(module), kind)(message)


def main() -> None:
    job = load_job()
    (job.workspace / "pids").open("a").write(f"{os.getpid()}\n")
    if order(job.name) == "hold":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if order(job.name) == "orphan":
        # The last argument tells it apart from every other process of this machine that sleeps.
        command = [sys.executable, "-c", "import time; time.sleep(600)", f"orphan of {job.workspace}"]
        child = subprocess.Popen(command, start_new_session=True)
        (job.workspace / "pids").open("a").write(f"{child.pid}\n")
    checkpoints = Checkpoints(job.checkpoints)
    newest = checkpoints.newest_valid()
    first = newest[0] if newest else 0
    log = MetricsLog(job, resume_step=first)
    for step in range(first + 1, NUM_STEPS + 1):
        if order(job.name) == "fail" or (order(job.name) == "fail-late" and step > 2):
            raise ValueError(f"{job.name} was told to fail")
        raise_as_told(job.name)
        while order(job.name) in ("wait", "hold") and step > 2 and not stop_requested():
            time.sleep(0.01)
        if stop_requested():
            leave_stopped()
        folder = checkpoints.begin(step)
        (folder / "step").write_text(str(step))
        checkpoints.commit(step)
        log.write(step, total=NUM_STEPS, loss=1.0 / step, resumed_from=first)
        if order(job.name).startswith("measure"):
            loss = float(order(job.name).split()[1])
            log.write(step, total=NUM_STEPS, event="eval", validation_loss=loss)
            log.write(step, total=NUM_STEPS, event="sample", prompt="p", text="t")  # as a real one, behind it
            until = time.monotonic() + (step == 2)
            while time.monotonic() < until and not stop_requested():
                time.sleep(0.01)
    log.close()
    job.output.mkdir(exist_ok=True)
    given = {label: sorted(p.name for p in folder.iterdir()) for label, folder in job.inputs.items()}
    (job.output / "made.json").write_text(
        json.dumps({"seed": job.config.seed, "kind": job.config.kind, "given": given})
    )
    (job.output / "report.md").write_text(f"# {job.name}\n")
    print(f"WARNING-free line of {job.name}", flush=True)
    finish(job, metrics={"final_loss": 1.0 / NUM_STEPS}, cost={"tokens": 100, "flops": 1000})


if __name__ == "__main__":
    main()
