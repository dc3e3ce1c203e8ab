"""A stage that a work pool's worker builds: sent there, waited for. What it made is found in the store.

The worker runs flows/pool_stage.py, on this machine or another one; it needs the same nanodag, the same store and the
address of this Prefect server. Cancel and a failure pass in both directions.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.runtime import task_run
from prefect.states import Cancelling

from nanodag.errors import ConfigError, StageFailed, StageInterrupted, StageStopped
from nanodag.host.folders import ABOVE
from nanodag.run.record import Run, StageResult
from nanodag.run.resource_requests import requests_of
from nanodag.server.local_server import HEARTBEAT_S

FLOW = "pool_stage"
ENTRYPOINT = f"{ABOVE}flows.pool_stage.pool_stage"
POLL_S = 1.0
NO_WORKER_S = 30.0
PENDING_TIMEOUT_S = 600.0  # a pod may wait that long for its image
CANCEL_TIMEOUT_S = 90.0


def build_in_pool(name: str, run: Run, inputs: Mapping[str, StageResult], *, force: bool) -> None:
    """Have a worker of the stage's pool build it, and wait for that.

    Raises ConfigError when there is no such pool, StageStopped when the run was told to stop, StageInterrupted when the
    worker was lost, StageFailed with the reason when the stage failed.
    """
    stage = run.pipeline.stages[name]
    pool = stage.resources.work_pool
    parameters = {
        "run": run.name,
        "stage": name,
        "store": run.store.url,
        "local": run.pipeline.store.local,
        "inputs": {label: asdict(result) for label, result in inputs.items()},
        "force": force,
        "parent": run.flow_run,
    }
    with get_client(sync_client=True) as client:
        template, flow = _template(client, pool), client.create_flow_from_name(FLOW)
        sent = client.create_flow_run_from_deployment(
            # Made again: it costs one call, and a stale one would cost a run.
            client.create_deployment(flow, name=pool, work_pool_name=pool, entrypoint=ENTRYPOINT),
            name=f"{run.name}-{name}",
            parameters=parameters,
            job_variables=requests_of(run.pipeline, name, run.machine).job_variables(template) | _environment(template),
            parent_task_run_id=UUID(task_run.id) if task_run.id else None,
        )
        state = _wait_for(client, sent.id, run, pool)
    if state.is_completed():
        return
    if run.stop.is_set():
        raise StageStopped(f"Stage {name} was stopped on the work pool {pool}.")
    if state.is_crashed():
        raise StageInterrupted(f"Stage {name}: the worker of the work pool {pool} was lost: {state.message}")
    raise StageFailed(state.message or f"Stage {name} ended as {state.name} on the work pool {pool}.")


def _template(client: SyncPrefectClient, pool: str) -> dict[str, Any]:
    """The base job template of a pool. Raises ConfigError when there is no such pool."""
    try:
        return client.read_work_pool(pool).base_job_template
    except ObjectNotFound as error:
        raise ConfigError(
            f"Prefect has no work pool {pool!r} (resources.work_pool). Start a worker, which makes it: "
            f"prefect worker start --pool {pool} --type process"
        ) from error


def _environment(template: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The job variable `env` with the heartbeat that flows/serve.py waits for, where the pool's template offers it.

    A worker that was started without it tells Prefect every 180 s only that its stage runs: the stage would be marked
    as lost while it trains. What the template itself says is kept.
    """
    env = template.get("variables", {}).get("properties", {}).get("env", {})
    if env.get("type") != "object":
        return {}
    return {"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S), **(env.get("default") or {})}}


def _wait_for(client: SyncPrefectClient, flow_run: UUID, run: Run, pool: str) -> State[Any]:
    """The state that a flow run ends in; it is cancelled once the run is told to stop."""
    logger = get_run_logger()
    began, is_cancelled, has_warned, pending_since = time.monotonic(), False, False, math.inf
    while True:
        state = client.read_flow_run(flow_run).state
        assert state is not None  # it has been Scheduled from the start
        if state.is_final():
            return state
        if run.stop.is_set() and not is_cancelled:
            client.set_flow_run_state(flow_run, Cancelling(), force=not state.is_running())
            is_cancelled, began = True, time.monotonic()
        if is_cancelled and time.monotonic() - began > CANCEL_TIMEOUT_S:
            return state
        pending_since = min(pending_since, time.monotonic()) if state.is_pending() else math.inf
        if time.monotonic() - pending_since > PENDING_TIMEOUT_S:
            # a worker that died between taking it and its first heartbeat: nothing marks it Crashed
            client.set_flow_run_state(flow_run, Cancelling(), force=True)
            raise StageInterrupted(f"The worker of the work pool {pool} that took the stage did not start it.")
        if state.is_scheduled() and not has_warned and time.monotonic() - began > NO_WORKER_S:
            logger.warning("No worker of the work pool %s has taken the stage yet; is one up?", pool)
            has_warned = True
        time.sleep(POLL_S)
