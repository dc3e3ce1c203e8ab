"""An OpenEnv server as an environment of ours. Standard library and websockets only.

Each episode is a session of its own: one connection to the server's `/ws`, which answers `{"type": "reset"}` and
`{"type": "step"}` with `{"type": "observation", "data": {"observation": {...}, "reward": ..., "done": ...}}`. How the
policy acts follows from the action's JSON schema, which the server tells at `/schema`:

- An MCP environment: its tools are the policy's, each call is a step, and speech without a call ends the episode.
- One required field, a text: what the policy says goes there.
- Other fields: the policy has one tool, `act`, whose arguments they are; speech without a call ends the episode.
"""

import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from nanodag.rl.environments.environment import Action

TIMEOUT_S = 30.0
MAX_BYTES = 4 << 20
SEEDS = 1 << 31  # servers hand the seed to libraries that take 32 bits
GENERIC = {"Action", "ListToolsAction", "CallToolAction"}  # of OpenEnv itself: an MCP environment
LEFT_OUT = {"metadata", "type"}


class OpenEnv:
    """url: of the server. action: the field that takes what the policy says; `auto` by the schema. observation: the
    field that the policy hears; `auto` for the one text of an observation, else all of it as JSON."""

    def __init__(self, *, url: str, action: str = "auto", observation: str = "auto") -> None:
        self._url, self._heard = url.rstrip("/"), observation
        schema = _schema_of(self._url)
        self._properties = {name: part for name, part in schema.get("properties", {}).items() if name not in LEFT_OUT}
        self._required = [name for name in schema.get("required", ()) if name in self._properties]
        self._is_mcp = action == "auto" and schema.get("title") in GENERIC
        self._field = action if action != "auto" else "" if self._is_mcp else self._one_text()
        if action != "auto" and action not in self._properties:
            raise ValueError(f"an action of {url} has no field {action!r}; it has {', '.join(self._properties)}")
        self._connection: ClientConnection | None = None
        self._tools: list[dict[str, Any]] = []

    def _one_text(self) -> str:
        names = self._required or list(self._properties)
        return names[0] if len(names) == 1 and self._properties[names[0]].get("type") == "string" else ""

    def reset(self, *, seed: int, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Begin a session. record: `metadata.reset` of it goes to the server's reset beside the seed."""
        address = "ws" + self._url.removeprefix("http") + "/ws"
        try:
            self._connection = connect(address, open_timeout=TIMEOUT_S, max_size=MAX_BYTES, proxy=None)
        except (OSError, WebSocketException) as error:
            raise ValueError(f"{self._url} cannot be reached: {error}") from error
        given = (record.get("metadata") or {}).get("reset") or {}
        told = self._asked("reset", {"seed": seed % SEEDS, **given})
        if self._is_mcp:
            listed = self._asked("step", {"type": "list_tools"})["observation"]["tools"]
            self._tools = [_tool(one["name"], one.get("description", ""), one["input_schema"]) for one in listed]
        elif not self._field:
            parameters = {"type": "object", "properties": self._properties, "required": self._required}
            self._tools = [_tool("act", "Acts in the environment.", parameters)]
        *before, last = record["messages"]
        text = self._text(told["observation"])
        return [*before, {**last, "content": f"{last['content']}\n\n{text}" if text else last["content"]}]

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """As the server lists them, in OpenAI's form."""
        return self._tools

    def step(self, action: Action) -> tuple[str | list[str], float, bool, Mapping[str, Any]]:
        """What the server answers. Several calls are several steps, until one of them ends the episode."""
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
        for one in steps:
            if done:
                texts.append("not done: the episode has ended")
                continue
            told = self._asked("step", one)
            texts.append(self._text(told["observation"]))
            reward += float(told.get("reward") or 0.0)
            done = bool(told.get("done", False))
        return texts[0] if len(texts) == 1 else texts, reward, done, {}

    def _asked(self, what: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._connection is not None  # reset has made it
        try:
            self._connection.send(json.dumps({"type": what, "data": dict(data)}))
            answer = json.loads(self._connection.recv())
        except (OSError, WebSocketException, ValueError) as error:
            raise ValueError(f"{self._url} did not answer {what}: {error}") from error
        if answer.get("type") != "observation":
            raise ValueError(f"{self._url} refuses {what}: {json.dumps(answer.get('data'))[:300]}")
        told: dict[str, Any] = answer["data"]
        return told

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._is_mcp and "tool_name" in observation:
            error = observation.get("error")
            result = observation.get("result")
            found = f"error: {error.get('message')}" if error else _plain(result)
            return found if isinstance(found, str) else json.dumps(found)
        if self._heard != "auto":
            found = observation.get(self._heard, "")
            return found if isinstance(found, str) else json.dumps(found)
        told = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
        texts = [value for value in told.values() if isinstance(value, str)]
        if len(texts) == 1:
            return texts[0]
        return json.dumps(told) if told else ""


def _plain(result: Any) -> Any:
    """What a tool returned, without the envelope that FastMCP puts around it."""
    if isinstance(result, Mapping) and "data" in result:
        return result["data"]
    return result


def _tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }


def _schema_of(url: str) -> dict[str, Any]:
    """The JSON schema of an action. Raises ValueError where the server does not tell it."""
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as `connect` goes
        with direct.open(f"{url}/schema", timeout=TIMEOUT_S) as answer:
            schema: dict[str, Any] = json.load(answer)["action"]
            return schema
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{url} does not tell its schema at {url}/schema: {type(error).__name__} {error}") from error
