"""Has a worker do a stage's work: what it is told, and its process on devices of this machine.

`build_stage` publishes what comes of it, `reproduce` compares it with what there is.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanodag.config import AnyStage, Pipeline
from nanodag.config.kinds import find_kind
from nanodag.errors import StageFailed
from nanodag.host.machine import visible_gpus
from nanodag.run.record import Run, StageResult
from nanodag.worker.devices import (
    STEP_BACK_S,
    devices_folder,
    devices_for,
    hold,
    named_gpus,
)
from nanodag.worker.job import Job
from nanodag.worker.launch import Result, run_worker


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a worker ended with, and how long it had waited for its devices."""

    result: Result
    waited_s: float


def job_of(run: Run, name: str, config: AnyStage, inputs: Mapping[str, StageResult], workspace: Path) -> Job:
    """What a stage's worker is told. The files of its inputs are brought here, and verified, first."""
    store = run.store
    return Job(
        name=name,
        run=run.name,
        config=config,
        inputs={label: store.materialize(store.attempt(r.key, r.attempt)) for label, r in inputs.items()},
        workspace=workspace,
        context={
            "preset": run.pipeline.preset,
            "mirror": run.pipeline.mirror,
            "store": str(store.local),
            "code": str(run.code_path),
            "trusted_modules": list(run.pipeline.trusted_modules),
            "composed": run.composed,
            "tracking": run.pipeline.tracking.model_dump(mode="json"),
            "trackers_folder": str(store.local / "trackers"),
            **_cluster_context(run.pipeline, config),
        },
    )


def _cluster_context(pipeline: Pipeline, stage: AnyStage) -> dict[str, Any]:
    """What a worker is told of other machines: nothing, for a stage on this one alone."""
    return {"cluster": pipeline.cluster.model_dump(mode="json")} if stage.machines else {}


def work(
    run: Run,
    job: Job,
    lock: int,
    *,
    on_devices: AbstractContextManager[Any] | None = None,
    steps_back: bool = False,
    on_line: Callable[[str], None] = lambda line: None,
    on_metrics: Callable[[dict[str, Any]], None] = lambda metrics: None,
    restarts: int = 0,
    restarts_left: int = 0,
) -> Done:
    """Wait for devices of this machine, and run the job there.

    lock: the descriptor of the key's lock, which the worker holds as long as it lives; it comes before the devices: who
    holds devices waits for nobody, so no two wait for each other. on_devices: entered once they are held, left when the
    worker has ended. steps_back: GPUs that another stage waits for are left to it. The others: as in
    nanodag.worker.launch.run_worker, which says what is raised.
    """
    stage, kind = job.config, find_kind(job.config.kind)
    device = str(stage.resources.device)
    devices = devices_for(
        device=device,
        num_gpus=stage.num_gpus(len(visible_gpus())),
        spare_gpus=stage.spare_gpus,
        is_beside=kind.is_beside,
        at_once=run.at_once,
    )
    step_back_s = STEP_BACK_S if (kind.is_beside or steps_back) and device == "cuda" else 0.0
    asked = time.monotonic()
    with hold(devices_folder(run.store), devices, stop=run.stop, step_back_s=step_back_s) as held:
        waited_s = time.monotonic() - asked
        with on_devices or contextlib.nullcontext():
            result = run_worker(
                kind.module,
                job,
                num_ranks=int(stage.resources.num_ranks) if kind.has_ranks else 1,
                nodes=stage.resources.num_nodes if kind.has_ranks else 1,
                threads=int(stage.resources.threads),
                device=device,
                gpus=named_gpus(held.numbers) if device == "cuda" else "",
                niceness=kind.niceness,
                hold=(lock, *held.descriptors),
                stop=run.stop,
                on_line=on_line,
                on_metrics=on_metrics,
                timeout_s=stage.timeout_s,
                restarts=restarts,
                restarts_left=restarts_left,
            )
    if not job.output.is_dir():
        raise StageFailed(f"Stage {job.name} said that it is done but left no folder {job.output}.")
    return Done(result=result, waited_s=waited_s)
