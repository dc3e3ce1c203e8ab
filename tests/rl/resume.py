"""RL stages on two ranks, killed, then stopped, then finished: `python -m tests.rl.resume`.

Critic or not, adapters or not, reference that is refreshed or not, under ZeRO 1 to 3: model, metrics, evaluations and
ledger must be those of a stage that nothing disturbed. Then stages go on by another number of ranks: the same ledger,
every loss within 1e-5.
"""

import argparse
import itertools
import os
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanodag.rl.rollouts.prompts import read_ledger
from nanodag.worker.job import STOPPED_EXIT_CODE, Job, write_job
from tests.rl.stages import make_job, metrics, run, same_in_the_end, start, wait_for_step

STEPS = 6
PARTS: dict[str, dict[str, Any]] = {
    "critic": {"advantage": "gae"},
    "adapters": {"lora_rank": 2, "lora_alpha": 8},
    "reference": {"kl_coefficient": 0.1, "reference_every": 2},
}


def make_stage(folder: Path, name: str, parts: tuple[str, ...], *, zero_stage: int, num_ranks: int = 2) -> Job:
    """A stage of 6 steps, a checkpoint after every second."""
    (folder / name).mkdir()
    values: dict[str, Any] = {"num_steps": STEPS, "checkpoint_every": 2, "eval_every": 3, "updates_per_step": 2}
    values |= {"zero_stage": zero_stage, "resources": {"num_ranks": num_ranks, "threads": 1, "device": "cpu"}}
    for part in parts:
        values |= PARTS[part]
    return make_job(folder / name, **values)


def interrupt(job: Job, signum: signal.Signals, *, after_step: int) -> None:
    """Run a stage until a step is logged, then send its process group a signal."""
    process = start(job)
    wait_for_step(job, process, after_step)
    os.killpg(process.pid, signum)
    code = process.wait(timeout=120)
    log = (job.workspace / "worker.log").read_text()[-4000:]
    assert code == (STOPPED_EXIT_CODE if signum == signal.SIGTERM else -signum), log


def killed_and_stopped(folder: Path, parts: tuple[str, ...], *, zero_stage: int) -> None:
    """Fails when what comes of it is not the same to the byte."""
    undisturbed = make_stage(folder, "undisturbed", parts, zero_stage=zero_stage)
    run(undisturbed)
    job = make_stage(folder, "disturbed", parts, zero_stage=zero_stage)
    interrupt(job, signal.SIGKILL, after_step=random.Random(str(parts)).randint(2, 3))
    interrupt(job, signal.SIGTERM, after_step=4)
    run(job)
    same_in_the_end(job, undisturbed)


def moved(folder: Path, before: int, after: int) -> float:
    """By how much the losses of a stage that goes on by another number of ranks are off, at most. Fails when a prompt
    is lost or trained twice."""
    undisturbed = make_stage(folder, "undisturbed", ("critic", "reference"), zero_stage=3, num_ranks=before)
    run(undisturbed)
    job = make_stage(folder, "moved", ("critic", "reference"), zero_stage=3, num_ranks=before)
    interrupt(job, signal.SIGKILL, after_step=3)
    resources = job.config.resources.model_copy(update={"num_ranks": after})
    job = replace(job, config=job.config.model_copy(update={"resources": resources}))
    write_job(job)
    run(job)
    ledgers = [read_ledger(one.records / "ledger.jsonl") for one in (job, undisturbed)]
    assert ledgers[0] == ledgers[1]
    pairs = zip(metrics(job), metrics(undisturbed), strict=True)
    names = ("loss", "value_loss", "kl")
    return max(abs(one[name] - other[name]) for one, other in pairs for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose line this pattern is found in")
    options = parser.parse_args()
    good = True
    choices = itertools.product((True, False), repeat=len(PARTS))
    for number, chosen in enumerate(choices):
        parts = tuple(name for name, is_in in zip(PARTS, chosen, strict=True) if is_in)
        zero_stage = 3 - number % 3
        line = f"2 ranks, ZeRO {zero_stage}, {' + '.join(parts) or 'policy alone'}"
        if re.search(options.only, line):
            good &= _told(line, lambda folder, p=parts, z=zero_stage: killed_and_stopped(folder, p, zero_stage=z))
    for before, after in ((2, 1), (1, 2)):
        line = f"{before} -> {after} ranks, ZeRO 3, critic + reference"
        if re.search(options.only, line):
            good &= _told(line, lambda folder, b=before, a=after: moved(folder, b, a))
    sys.exit(not good)


def _told(line: str, what: Any) -> bool:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            off = what(Path(folder))
        except AssertionError as error:
            print(f"{line}: FAILED {str(error)[:3000]}", flush=True)
            return False
    said = "the same bytes" if off is None else f"same ledger, losses off by {off:.1e} at most"
    print(f"{line}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
    return off is None or off < 1e-5


if __name__ == "__main__":
    main()
