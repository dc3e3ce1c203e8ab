"""The schedule's switch, by Prefect's REST API: what `nanodag nightly on` and `off` turn.

The switch is in Prefect, where its UI turns it too. Serving again keeps it, until the nightly section changes.
"""

from collections.abc import Mapping
from typing import Any

from nanodag.config.cron import zone_of
from nanodag.config.nightly import NightlyConfig
from nanodag.errors import ServerError

TIMEOUT_S = 30.0

Login = tuple[str, str] | None


def cron_of(config: NightlyConfig) -> dict[str, Any]:
    """The schedule as Prefect takes it."""
    return {"cron": config.schedule, "timezone": zone_of(config.timezone)}


def read_switch(url: str, deployment: str, *, login: Login = None) -> dict[str, Any]:
    """The schedule of the deployment `nightly_eval`: `id`, `active`, `schedule`, `parameters`. url: the server's."""
    schedules = _ask("GET", f"{url}/api/deployments/{deployment}/schedules", login=login)
    if len(schedules) != 1:
        raise ServerError(
            f"The deployment of nightly_eval has {len(schedules)} schedules instead of one; remove what was added in "
            "Prefect's UI, or restart with: nanodag server stop; nanodag server start"
        )
    return schedules[0]


def turn(url: str, deployment: str, *, active: bool, login: Login = None, **changes: Mapping[str, Any]) -> None:
    """Turn the schedule on or off. changes: its `schedule` and `parameters`, kept when not given."""
    found = read_switch(url, deployment, login=login)
    body = {"active": active, **changes}
    _ask("PATCH", f"{url}/api/deployments/{deployment}/schedules/{found['id']}", body, login=login)


def _ask(method: str, url: str, body: Mapping[str, Any] | None = None, *, login: Login) -> Any:
    import httpx

    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=False, auth=login) as client:  # as nanodag.server
            answer = client.request(method, url, json=body)
    except httpx.TransportError as error:
        raise ServerError(f"Prefect's server does not answer {method} {url}: {error}.") from error
    if answer.status_code >= 400:
        raise ServerError(f"Prefect's server refused {method} {url} with {answer.status_code}: {answer.text[:300]}")
    return answer.json() if answer.content else None
