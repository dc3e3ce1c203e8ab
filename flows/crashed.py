"""An automation of Prefect's: a flow run whose process is gone, with nobody left to say so, is marked Crashed.

A flow's process tells the server every 30 s that it is there. When WITHIN has passed without that since it began, and
without the run's end, the run is marked Crashed; Retry then goes on from the newest checkpoints. A process that is
killed alone is marked at once by the one that serves the flows; this is for when both go, as when the machine does.
"""

from datetime import timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

NAME = "mark dead runs as Crashed"
WITHIN = timedelta(seconds=90)  # three heartbeats
HEARTBEAT = "prefect.flow-run.heartbeat"
BEGUN = "prefect.flow-run.Running"  # a process may be gone before its first heartbeat
ENDS = ("Completed", "Failed", "Cancelled", "Crashed")


def register(client: SyncPrefectClient) -> None:
    """Have the server watch over every flow run, once, however often it is asked to.

    What is there already is left alone: the server forgets whom it has heard of when an automation changes, and this is
    called again just when a run's process may have gone together with what serves the flows.
    """
    automation = AutomationCore(
        name=NAME,
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
    automations = client.read_automations_by_name(NAME)
    for existing in automations[:1]:
        if any(getattr(existing, name) != getattr(automation, name) for name in ("description", "enabled", "trigger")):
            client.update_automation(existing.id, automation)
    if not automations:
        client.create_automation(automation)
