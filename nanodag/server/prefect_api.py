"""Client of Prefect's server: its login, a file of one line that nobody else may read, and calls of its REST API."""

import secrets
import stat
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from nanodag.errors import ConfigError, ServerError

FINAL_STATES = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
BUSY_FOR_S = 30.0
NO_LOGIN = "none"
HOW = 'Make it so: (umask 077; echo "team:$(openssl rand -hex 16)" > FILE)'


def read_login(file: str) -> tuple[str, str] | None:
    """User and password; None when the server asks for none.

    Raises ConfigError when the file (server.password_file) is not there, is no such line, or others may read it. No
    message holds what the file says.
    """
    if file == NO_LOGIN:
        return None
    path = Path(file)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        user, colon, password = path.read_text(encoding="utf-8").strip().partition(":")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"server.password_file {path} cannot be read: {type(error).__name__}. {HOW}") from error
    if mode & 0o077:
        raise ConfigError(f"server.password_file {path} may be read by others (mode {mode:o}). Run: chmod 600 {path}")
    if not (user and colon and password) or len(password.split()) != 1:
        raise ConfigError(f"server.password_file {path} is not one line of the form user:password. {HOW}")
    return user, password


class Api:
    """The few calls of Prefect's REST API that are needed. url: of the server, without /api. login: user, password."""

    def __init__(self, url: str, *, login: tuple[str, str] | None = None) -> None:
        self._url = f"{url}/api"
        self._login = login
        self._client = secrets.token_hex(16)
        self._token: dict[str, str] | None = None

    def is_healthy(self) -> bool:
        try:
            return self._send("GET", "/health", timeout_s=2.0).status_code == 200
        except httpx.TransportError:
            return False

    def create_run(self, deployment: str, *, name: str, parameters: Mapping[str, Any]) -> str:
        """Create a flow run of a deployment; returns its id."""
        # With the key, asking again for want of an answer makes no second run.
        body = {"name": name, "parameters": dict(parameters), "idempotency_key": secrets.token_hex(16)}
        return str(self.ask("POST", f"/deployments/{deployment}/create_flow_run", body)["id"])

    def run_state(self, flow_run: str) -> dict[str, str]:
        """`type`, `name` and `message` of a flow run's state."""
        state = self.ask("GET", f"/flow_runs/{flow_run}")["state"] or {"type": "PENDING", "name": "Pending"}
        return {field: state.get(field) or "" for field in ("type", "name", "message")}

    def num_active_runs(self) -> int:
        """Number of flow runs that are under way, or asked for and about to be taken by what serves."""
        under_way = {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
        now = datetime.now(UTC).isoformat()  # a night that is to come is scheduled too
        asked_for = {
            "state": {"type": {"any_": ["SCHEDULED"]}},
            "expected_start_time": {"before_": now},
            "parent_task_run_id": {"is_null_": True},  # a stage of a work pool may wait for a worker for ever
        }
        return sum(
            int(self.ask("POST", "/flow_runs/count", {"flow_runs": run_filter}))
            for run_filter in (under_way, asked_for)
        )

    def set_state(self, flow_run: str, kind: str, message: str, *, name: str = "") -> None:
        """Ask for a state; `CANCELLING` has the runner end the flow's process, `SCHEDULED` runs it again."""
        state = {"type": kind, "name": name or kind.capitalize(), "message": message}
        self.ask("POST", f"/flow_runs/{flow_run}/set_state", {"state": state, "force": kind == "CRASHED"})

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer as JSON, None for an empty one. Raises ServerError when there is none, or it is a refusal."""
        deadline = time.monotonic() + BUSY_FOR_S
        try:
            # 503 is how Prefect says that its database is locked by another writer.
            while (answer := self._send(method, path, body)).status_code == 503 and time.monotonic() < deadline:
                time.sleep(0.2)
        except httpx.TransportError as error:
            raise ServerError(f"Prefect's server at {self._url} does not answer: {error}.") from error
        if answer.status_code >= 400:
            what = f"{answer.status_code}: {answer.text[:500]}"
            raise ServerError(f"Prefect's server refused {method} {path} with {what}")
        return answer.json() if answer.content else None

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 30.0
    ) -> httpx.Response:
        # trust_env: a proxy of the user's has no business with loopback. verify: nothing here is encrypted, and loading
        # certificates takes longer than the call.
        with httpx.Client(timeout=timeout_s, trust_env=False, verify=False, auth=self._login) as client:
            if method == "GET":
                return client.request(method, self._url + path)
            for is_new in (self._token is None, True):  # a token has an end
                self._token = self._new_token(client) if is_new else self._token
                answer = client.request(method, self._url + path, json=body, headers=self._token)
                if answer.status_code != httpx.codes.FORBIDDEN:
                    break
            return answer

    def _new_token(self, client: httpx.Client) -> dict[str, str]:
        """The headers without which the server changes nothing: no page of another origin can read a token."""
        answer = client.get(f"{self._url}/csrf-token", params={"client": self._client})
        if answer.status_code != httpx.codes.OK:
            return {}  # it asks for none; or the request itself will be refused for the same reason
        return {"Prefect-Csrf-Client": self._client, "Prefect-Csrf-Token": answer.json()["token"]}
