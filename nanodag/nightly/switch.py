"""The schedule's switch, by Prefect's REST API: what `nanodag nightly on` and `off` turn.

The switch is in Prefect, where its UI turns it too. Serving again keeps it, until the nightly section changes.
"""

from collections.abc import Mapping
from typing import Any

from nanodag.config.nightly import NightlyConfig, zone_of
from nanodag.errors import ServerError
from nanodag.server.local_server import Api


def cron_of(config: NightlyConfig) -> dict[str, Any]:
    """The schedule as Prefect takes it."""
    return {"cron": config.schedule, "timezone": zone_of(config.timezone)}


def read_switch(api: Api, deployment: str) -> dict[str, Any]:
    """The schedule of the deployment `nightly_eval`: `id`, `active`, `schedule`, `parameters`."""
    schedules = api.ask("GET", f"/deployments/{deployment}/schedules")
    if len(schedules) != 1:
        raise ServerError(
            f"The deployment of nightly_eval has {len(schedules)} schedules instead of one; remove what was added in "
            "Prefect's UI, or restart with: nanodag server stop; nanodag server start"
        )
    return schedules[0]


def turn(api: Api, deployment: str, *, active: bool, **changes: Mapping[str, Any]) -> None:
    """Turn the schedule on or off. changes: its `schedule` and `parameters`, kept when not given."""
    schedule = read_switch(api, deployment)
    api.ask("PATCH", f"/deployments/{deployment}/schedules/{schedule['id']}", {"active": active, **changes})
