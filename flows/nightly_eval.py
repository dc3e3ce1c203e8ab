"""Evals by schedule: the newest model of each chosen run and stage, compared with the nights before.

eval ┐
eval ├─> trend page ─> nothing got worse
eval ┘
"""

import hashlib
from datetime import datetime
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State

from flows.deployments import find
from nanodag.config import resolve
from nanodag.nightly.findings import NightFindings
from nanodag.nightly.nights import Skipped, begin_night, check_night, cron_of
from nanodag.run.record import pipeline_file
from tasks.nightly import evaluated, nothing_got_worse, start_evals, trend
from tasks.stage_task import ending, flow_of_stages, outcome, own_flow_run


def _flow_run_name() -> str:
    parameters = flow_run.parameters or {}
    return str(parameters.get("name") or f"nightly {flow_run.scheduled_start_time or datetime.now():%Y-%m-%d %H:%M}")


@flow_of_stages(flow_run_name=_flow_run_name)
def nightly_eval(
    name: str = "", preset: str = "auto", overrides: tuple[str, ...] = (), file: str = "", by_schedule: bool = False
) -> State[Any]:
    """Evaluate the newest models, and say what got worse by more than noise.

    Args:
        name: the night's name, which begins with nightly-; by time when empty
        preset: whose `nightly` section says what is evaluated; auto takes the file's default
        overrides: dotted.name=value, as in nightly.stages=[sft,rl]
        file: the pipeline file; empty for the one that is served
        by_schedule: it is the night that the schedule was last due, and is left alone when another run took it
    """
    night = begin_night(
        name=name, by_schedule=by_schedule, flow_run=own_flow_run(), file=file, preset=preset, overrides=overrides
    )
    if isinstance(night, Skipped):
        return Completed(name="Skipped", message=night.reason)
    check_night(night)
    with ending(night.run):
        futures = start_evals(night)
        ends = [outcome(night.run.to_do, futures)]  # waits for them
        page = trend(night, evaluated(night, futures), return_state=True)
        if page.is_completed():
            findings: NightFindings = page.result()
            ends.append(nothing_got_worse(findings, return_state=True))
    failed = [state for state in [*ends, page] if not state.is_completed()]
    return Failed(message="\n".join(state.message or "" for state in failed)) if failed else ends[0]


def schedule() -> dict[str, Any]:
    """Settings of the deployment: the schedule of the pipeline that is served.

    How it was switched since, by `nanodag nightly on` or in the UI, is kept as long as that pipeline's `nightly`
    section, which the deployment's version stands for, is the same.
    """
    config = resolve(pipeline_file("")).pipeline.nightly
    version = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]
    made = DeploymentScheduleCreate(
        schedule=CronSchedule(**cron_of(config)),
        active=config.enabled,
        parameters={"by_schedule": True},
        slug="nightly",
    )
    with get_client(sync_client=True) as client:
        known = find(client, "nightly_eval")
    if known is not None and known.version == version and len(known.schedules) == 1:
        kept = known.schedules[0]
        made = made.model_copy(update={f: getattr(kept, f) for f in ("schedule", "active", "parameters")})
    return {"schedules": [made], "version": version}
