"""One stage of a run whose flow is elsewhere: what a worker of a work pool runs (tasks/pool.py sends it)."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.states import State

from nanodag.run.record import Run, StageResult, join_run
from nanodag.store import Store
from tasks.stage_task import flow_of_stages, outcome, own_flow_run, submit

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0


@flow_of_stages(flow_run_name="{run}-{stage}", is_told=False)
def pool_stage(
    run: str,
    stage: str,
    store: str,
    local: str,
    inputs: dict[str, dict[str, Any]],
    parent: str,
    force: bool = False,
) -> State[Any]:
    """Run a stage of a run on what the run's flow gives it.

    Args:
        run: the run's name
        stage: its stage
        store: the store's address; local: its local folder, or auto
        inputs: input name -> a finished stage's result
        parent: the flow run that waits for it, and with which it ends
        force: build it again though the store has it
    """
    own_flow_run()
    joined = join_run(run, Store(store, local=None if local == "auto" else Path(local)))
    joined.note(stage, worker=os.environ.get("PREFECT__WORKER_NAME", ""))
    results = {label: StageResult(**result) for label, result in inputs.items()}
    with _ending_with(parent, joined):
        future = submit(joined, stage, results, force=force)
        return outcome([stage], {stage: future})


@contextmanager
def _ending_with(parent: str, run: Run) -> Iterator[None]:
    """Leave no worker process behind, and stop once the flow that waits for this one has ended without it."""
    is_over = threading.Event()

    def look() -> None:
        with get_client(sync_client=True) as client:
            while not is_over.wait(LOOK_EVERY_S):
                try:
                    state = client.read_flow_run(parent).state
                except Exception:
                    log.warning("Whether the run goes on cannot be asked.", exc_info=True)
                    continue
                if state is not None and state.is_final():
                    run.stop.set()
                    return

    watch = threading.Thread(target=look, daemon=True, name="parent")
    watch.start()
    try:
        yield
    finally:
        is_over.set()
        run.stop.set()
