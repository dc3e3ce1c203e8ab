"""Benchmarks that weights under training are asked: by an eval stage's own worker, on a folder of the weights as they
are. So scores are those of an eval stage, and nothing in the trainer's process changes, no random number either."""

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nanodag.config.derive_sampler import derive_evaluation, this_machine
from nanodag.sampler.device import give_back
from nanodag.train.setup import PreparedStage
from nanodag.worker.job import Job, stop_requested
from nanodag.worker.launch import Watch, run_worker

POLL_S = 0.2


def ask_benchmarks(stage: PreparedStage, step: int, write: Callable[..., None]) -> dict[str, float] | None:
    """The main score of each benchmark of the stage, the same on every rank; None once a stop was asked for.

    All ranks must call it, and wait for rank 0's worker. write: MetricsLog's; it gets a line for each benchmark, whose
    items stay in the stage's records, benchmarks/step-STEP.NAME.jsonl. Raises StageFailed where the worker failed.
    """
    engine, workspace, began = stage.engine, stage.job.workspace / "asked", time.monotonic()
    if engine.highest(stop_requested()) > 0:
        return None
    if engine.rank == 0:
        shutil.rmtree(workspace, ignore_errors=True)  # of a process that was killed here
        (workspace / "model").mkdir(parents=True)
    engine.barrier()
    stage.export(workspace / "model", whole=True)
    give_back(engine.device)  # what a step's activations took, for the worker

    def tell(line: dict[str, Any]) -> None:
        if line["event"] == "phase":
            told = {name: line[name] for name in ("event", "phase", "done", "of", "unit")}
            write(step, total=stage.num_steps, **told)

    watch = Watch(on_metrics=tell)
    with ThreadPoolExecutor(1) as executor:
        worker = executor.submit(run_worker, _job(stage, workspace), watch=watch) if engine.rank == 0 else None
        try:
            while engine.highest(worker is not None and not worker.done()) > 0:
                if engine.highest(stop_requested()) > 0:
                    watch.stop.set()
                time.sleep(POLL_S)
        finally:
            watch.stop.set()  # where a rank is lost too: the executor waits for the worker
    if engine.highest(stop_requested()) > 0:
        return None
    results: dict[str, Any] = {}
    if worker is not None:
        worker.result()
        results = json.loads((workspace / "output" / "results.json").read_text(encoding="utf-8"))["benchmarks"]
        _keep(stage, step, workspace)
    results = engine.gathered(results)[0]
    told = ("metric", "higher_is_better", "low", "high", "too_long", "unparsed", "truncated")
    for name, result in results.items():
        values = {f"benchmark_{name}": result["value"], f"benchmark_{name}_stderr": result["stderr"]}
        values |= {key: result[key] for key in told} | {"seconds_evaluate": time.monotonic() - began}
        write(step, total=stage.num_steps, event="eval", benchmark=name, **values)
    return {name: result["value"] for name, result in results.items()}


def _job(stage: PreparedStage, workspace: Path) -> Job:
    job, asked = stage.job, stage.config.own_evaluation("model")
    assert asked is not None
    return Job(
        name=job.name,  # which advice on how to go on names
        run=job.run,
        config=derive_evaluation(job.name, asked, this_machine(), None, {}),
        inputs={"model": workspace / "model"},
        workspace=workspace,
        context={**job.context, "tracking": {}, "waited_for": True},
    )


def _keep(stage: PreparedStage, step: int, workspace: Path) -> None:
    folder = stage.job.records / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    for path in (workspace / "output" / "samples").glob("*.jsonl"):
        os.replace(path, folder / f"step-{step:08d}.{path.name}")
    shutil.rmtree(workspace)
