"""Serves the flows: `python -m flows.serve READY` registers their deployments, says so in the file READY, and runs what
is asked for until it is ended. It may be started before the server answers.

An automation of Prefect's marks a flow run as Crashed whose process is gone with nobody left to say so. A flow's
process tells the server every 30 s that it is there. When WITHIN has passed without that since it began, and without
the run's end, the run is marked; Retry then goes on from the newest checkpoints. A process that is killed alone is
marked at once by the one that serves the flows; this is for when both go, as when the machine does.
"""

import asyncio
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from uuid import UUID

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
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.runner import Runner
from prefect.states import Cancelled, Crashed

from flows import deployments, nightly_eval
from flows.run_stage import run_stage
from flows.speedrun import speedrun
from flows.sweep import sweep
from nanodag.run.record import served_store
from nanodag.server.prefect_api import Api
from nanodag.store import write_json
from nanodag.worker.respawn import SERVING

WATCH = "mark dead runs as Crashed"
WITHIN = timedelta(seconds=90)  # three heartbeats
HEARTBEAT = "prefect.flow-run.heartbeat"
BEGUN = "prefect.flow-run.Running"  # a process may be gone before its first heartbeat
ENDS = ("Completed", "Failed", "Cancelled", "Crashed")
START_TIMEOUT_S = 1800.0  # nanodag.server.local_server ends it when that server does not get on


def main() -> None:
    ready = Path(sys.argv[1])
    _wait_for_server()
    with get_client(sync_client=True) as client:
        watch_runs(client)
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
    write_json(ready, ids)
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
    api, deadline = Api(os.environ["PREFECT_API_URL"].removesuffix("/api")), time.monotonic() + START_TIMEOUT_S
    while not api.is_healthy():
        if time.monotonic() > deadline:
            raise TimeoutError(f"No Prefect server at {os.environ['PREFECT_API_URL']} after {START_TIMEOUT_S:.0f} s")
        time.sleep(0.1)


def watch_runs(client: SyncPrefectClient) -> None:
    """Have the server watch over every flow run, once, however often it is asked to.

    What is there already is left alone: the server forgets whom it has heard of when an automation changes, and this is
    called again just when a run's process may have gone together with what serves the flows.
    """
    automation = AutomationCore(
        name=WATCH,
        description=f"A flow run that is not heard of for {WITHIN.seconds} s has lost its process.",
        enabled=True,
        trigger=EventTrigger(
            after={BEGUN, HEARTBEAT},
            expect={HEARTBEAT, *(f"prefect.flow-run.{end}" for end in ENDS)},
            match={"prefect.resource.id": "prefect.flow-run.*"},  # type: ignore[arg-type]
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=WITHIN,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                message=f"Not heard of for {WITHIN.seconds} s. Retry goes on from the newest checkpoint.",
            )
        ],
    )
    automations = client.read_automations_by_name(WATCH)
    for existing in automations[:1]:
        if any(getattr(existing, name) != getattr(automation, name) for name in ("description", "enabled", "trigger")):
            client.update_automation(existing.id, automation)
    if not automations:
        client.create_automation(automation)


if __name__ == "__main__":
    main()
