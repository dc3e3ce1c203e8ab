"""An episode: what runs in a fork of the environment's process. Standard library and the environment only.

It reads JSON lines and answers each: `{"reset": {"seed", "record"}}` -> `{"observation", "tools"}`;
`{"step": {"text", "calls", "is_cut", "role"}}` -> `{"observation", "reward", "done", "info"}`;
`{"end": {}}` -> `{"metrics"}`. What raises, and what is no JSON, is answered `{"error"}`.
"""

import json
import random
import socket
from collections.abc import Mapping
from typing import Any

from nanodag.own_code.blame import with_place
from nanodag.rl.environments.environment import Action, Environment, ToolCall


def serve(environment: Environment, connection: socket.socket) -> None:
    """Answer until the other end is closed. Raises OSError where the environment has closed this one."""
    with connection.makefile("rb") as lines:
        for line in lines:
            connection.sendall(answer(environment, json.loads(line)) + b"\n")


def answer(environment: Environment, asked: Mapping[str, Any]) -> bytes:
    """One line of JSON, without the newline."""
    ((name, given),) = asked.items()
    try:
        return json.dumps(_CALLS[name](environment, given), allow_nan=False).encode()
    except BaseException as error:  # noqa: BLE001 - also what sys.exit raises: it ends the episode with the reason
        return json.dumps({"error": with_place(error)}).encode()


def _reset(environment: Environment, given: Mapping[str, Any]) -> dict[str, Any]:
    random.seed(given["seed"])  # a fork seeds it with noise
    observation = environment.reset(seed=given["seed"], record=given["record"])
    tools = getattr(environment, "tools", None)
    return {"observation": observation, "tools": [] if tools is None else tools()}


def _step(environment: Environment, given: Mapping[str, Any]) -> dict[str, Any]:
    calls = tuple(ToolCall(call["name"], call["arguments"]) for call in given["calls"])
    found = environment.step(Action(given["text"], calls, given["is_cut"], given["role"]))
    if not isinstance(found, tuple | list) or len(found) != 4:
        raise ValueError(f"step must return (observation, reward, done, info); found {found!r:.200}")
    return dict(zip(("observation", "reward", "done", "info"), found, strict=True))


def _end(environment: Environment, given: Mapping[str, Any]) -> dict[str, Any]:
    metrics = getattr(environment, "metrics", None)
    return {"metrics": {} if metrics is None else metrics()}


_CALLS = {"reset": _reset, "step": _step, "end": _end}
