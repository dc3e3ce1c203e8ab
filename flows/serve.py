"""Serves the flows: `python -m flows.serve READY` registers their deployments, says so in the file READY, and runs what
is asked for until it is ended. It may be started before the server answers."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.deployments.runner import EntrypointType
from prefect.runner import Runner
from prefect.states import Cancelled, Crashed

from flows import crashed, deployments, nightly_eval
from flows.run_stage import run_stage
from flows.speedrun import speedrun
from flows.sweep import sweep
from nanodag.run.record import served_store
from nanodag.worker.respawn import SERVING

START_TIMEOUT_S = 1800.0  # nanodag.server.local_server ends it when that server does not get on


def main() -> None:
    ready = Path(sys.argv[1])
    _wait_for_server()
    with get_client(sync_client=True) as client:
        crashed.register(client)
    # pause_on_shutdown: an old process that is slow to end must not pause a new one's deployments.
    runner = Runner(name="nanodag", pause_on_shutdown=False, query_seconds=1, limit=None)
    ids = {}
    options = {
        "nightly_eval": nightly_eval.schedule(),
        "run_stage": {"enforce_parameter_schema": False},  # what its form offers is not all that there may be
    }
    for flow in (speedrun, run_stage, sweep, nightly_eval.nightly_eval):
        # By module: a file path would put its folder in front of sys.path.
        made = {"entrypoint_type": EntrypointType.MODULE_PATH, **options.get(flow.name, {})}
        made["description"] = (flow.description or "").partition("\n\nArgs:")[0]
        deployment = flow.to_deployment(deployments.NAMES[flow.name], **made)
        ids[flow.name] = str(runner.add_deployment(deployment))
    with get_client(sync_client=True) as client:
        end_orphans(client, [UUID(deployment_id) for deployment_id in ids.values()])
    deployments.offer_runs(served_store())
    os.environ[SERVING] = str(os.getpid())
    _write(ready, json.dumps(ids))
    asyncio.run(runner.start())


def end_orphans(client: SyncPrefectClient, of: list[UUID]) -> None:
    """Give an end to flow runs that a process before this one was about to start, or to end, when it was killed: nobody
    else would, and they would count as under way for ever."""
    ends = {
        StateType.PENDING: Crashed(message="What was to start it was killed. Retry starts it again."),
        StateType.CANCELLING: Cancelled(message="What was to end it was killed, and it with that."),
    }
    for kind, end in ends.items():
        runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[kind]))),
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=of)),
        )
        for run in runs:
            client.set_flow_run_state(run.id, end, force=True)


def _wait_for_server() -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(os.environ["PREFECT_API_URL"] + "/health", timeout=2.0, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError(f"No Prefect server at {os.environ['PREFECT_API_URL']} after {START_TIMEOUT_S:.0f} s")


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    main()
