"""An OpenEnv server as an environment of ours. Standard library and websockets only.

Each episode is a session of its own: one connection to the server's `/ws`, which answers `{"type": "reset"}` and
`{"type": "step"}` with `{"type": "observation", "data": {"observation": {...}, "reward": ..., "done": ...}}`. How the
policy acts follows from the action's JSON schema, which the server tells at `/schema` (docs/how-to/environment.md). An
action that does not fit it is the policy's mistake: it hears what is wrong with it. An environment that raises fails
the episode.
"""

import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from nanodag.data.records import message_text
from nanodag.rl.environments.environment import Action, tool_named

TIMEOUT_S = 30.0
FREE_TIMEOUT_S = 10.0  # a server ends the session of a connection that is gone in its own time
LOOK_EVERY_S = 0.1
MAX_BYTES = 4 << 20
SEEDS = 1 << 31  # servers hand the seed to libraries that take 32 bits
GENERIC = {"Action", "ListToolsAction", "CallToolAction"}  # of OpenEnv itself: an MCP environment
LEFT_OUT = {"metadata", "type"}
ACT = "act"  # the tool of a server that lists none


class OpenEnv:
    """url: of the server. action: the field that takes what the policy says, or `act`; `auto` by the schema.
    observation: the field that the policy hears; `auto` for the text of an observation that has nothing else, else all
    of it as JSON."""

    def __init__(self, *, url: str, action: str = "auto", observation: str = "auto") -> None:
        self._url, self._heard = url.rstrip("/"), observation
        schema = _schema_of(self._url)
        self._definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}  # what `properties` refer to
        self._properties = {name: part for name, part in schema.get("properties", {}).items() if name not in LEFT_OUT}
        self._required = [name for name in schema.get("required", ()) if name in self._properties]
        self._is_mcp = action == "auto" and schema.get("title") in GENERIC
        named = "" if action in ("auto", ACT) else action
        self._field = named or (self._one_text() if action == "auto" and not self._is_mcp else "")
        if named and named not in self._properties:
            raise ValueError(f"an action of {url} has no field {action!r}; it has {', '.join(self._properties)}")
        self._connection: ClientConnection | None = None
        self._tools: list[dict[str, Any]] = []

    def _one_text(self) -> str:
        names = self._required or list(self._properties)
        return names[0] if len(names) == 1 and self._properties[names[0]].get("type") == "string" else ""

    def reset(self, *, seed: int, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Begin a session. record: `metadata.reset` of it goes to the server's reset beside the seed."""
        options = (record.get("metadata") or {}).get("reset") or {}
        told = self._begun({"seed": seed % SEEDS, **options})
        if self._is_mcp:
            answer = self._asked("step", {"type": "list_tools"})
            listed = self._observed("step", answer)["observation"]["tools"]
            self._tools = [tool_named(t["name"], t.get("description", ""), t["input_schema"]) for t in listed]
        elif not self._field:
            parameters = {"type": "object", "properties": self._properties, "required": self._required}
            self._tools = [tool_named(ACT, "Acts in the environment.", {**parameters, **self._definitions})]
        *before, last = record["messages"]
        asked, text = message_text(last), self._text(told["observation"])
        return [*before, {**last, "content": f"{asked}\n\n{text}" if text else asked}]

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The server's tools, in OpenAI's form."""
        return self._tools

    def step(self, action: Action) -> tuple[str | list[str], float, bool, Mapping[str, Any]]:
        """Answer of the server. Several calls are several steps, until one of them ends the episode."""
        if self._field:
            steps: list[dict[str, Any]] = [{self._field: action.text}]
        elif self._is_mcp:
            steps = [
                {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
                for call in action.calls
            ]
        else:
            steps = [dict(call.arguments) for call in action.calls]
        texts, reward, done = [], 0.0, not steps
        for step in steps:
            if done:
                texts.append("not done: the episode has ended")
                continue
            answer = self._asked("step", step)
            if mistakes := _mistakes(answer):
                texts.append(f"error: {mistakes}")
                continue
            told = self._observed("step", answer)
            texts.append(self._text(told["observation"]))
            reward += float(told.get("reward") or 0.0)
            done = bool(told.get("done", False))
        return texts[0] if len(texts) == 1 else texts, reward, done, {}

    def _begun(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """First answer of a session, which may wait for the end of another."""
        deadline, address = time.monotonic() + FREE_TIMEOUT_S, "ws" + self._url.removeprefix("http") + "/ws"
        while True:
            try:
                self._connection = connect(address, open_timeout=TIMEOUT_S, max_size=MAX_BYTES, proxy=None)
            except (OSError, WebSocketException) as error:
                raise ValueError(f"{self._url} cannot be reached: {error}") from error
            answer = self._asked("reset", given)
            if _code(answer) != "CAPACITY_REACHED":
                return self._observed("reset", answer)
            if time.monotonic() > deadline:
                most = answer["data"].get("max_sessions")
                raise ValueError(
                    f"{self._url} allows {most} sessions at once (max_concurrent_envs): set generate.options.at_once "
                    f"to at most {most}, or start it with more"
                )
            self._connection.close()
            time.sleep(LOOK_EVERY_S)

    def _observed(self, what: str, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The observation in an answer. Raises ValueError for one that refuses."""
        if answer.get("type") != "observation":
            raise ValueError(f"{self._url} refuses {what}: {json.dumps(answer.get('data'))[:300]}")
        return answer["data"]

    def _asked(self, what: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._connection is not None  # reset has made it
        try:
            with suppress(ConnectionClosed):  # a server that has no place for it says so before it hangs up
                self._connection.send(json.dumps({"type": what, "data": dict(data)}))
            answer = json.loads(self._connection.recv())
        except (OSError, WebSocketException, ValueError) as error:
            raise ValueError(f"{self._url} did not answer {what}: {error}") from error
        if not isinstance(answer, dict):
            raise ValueError(f"{self._url} answers {what} with what is no object: {answer!r:.100}")
        return answer

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._is_mcp and "tool_name" in observation:
            error, content = observation.get("error"), observation.get("result")
            if error:
                return f"error: {error.get('message')}"
            if isinstance(content, Mapping) and "data" in content:  # the envelope that FastMCP puts around it
                content = content["data"]
        elif self._heard != "auto":
            content = observation.get(self._heard, "")
        else:
            told = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
            texts = [value for value in told.values() if isinstance(value, str)]
            content = texts[0] if len(told) == len(texts) == 1 else told or ""
        return content if isinstance(content, str) else json.dumps(content)


def _code(answer: Mapping[str, Any]) -> str:
    """Code of an error; empty for another answer."""
    data = answer.get("data")
    return str(data.get("code", "")) if answer.get("type") == "error" and isinstance(data, Mapping) else ""


def _mistakes(answer: Mapping[str, Any]) -> str:
    """Mistakes of an action that does not fit its schema; empty for another answer."""
    if _code(answer) != "VALIDATION_ERROR":
        return ""
    mistakes = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in answer["data"].get("errors", ())]
    return "; ".join(mistakes) or str(answer["data"].get("message", "invalid action"))


def _schema_of(url: str) -> dict[str, Any]:
    """The JSON schema of an action. Raises ValueError where the server does not tell it."""
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as `connect` goes
        with direct.open(f"{url}/schema", timeout=TIMEOUT_S) as answer:
            return json.load(answer)["action"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{url} does not tell its schema at {url}/schema: {type(error).__name__} {error}") from error
