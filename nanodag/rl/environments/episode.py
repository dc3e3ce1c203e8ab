"""An episode: what a fork of an environment's process answers. Standard library and the environment only.

`{"reset": {"seed", "record"}}` -> `{"observation", "tools"}`; `{"step": {"text", "calls", "is_cut", "role"}}` ->
`{"observation", "reward", "done", "info"}`; `{"end": {}}` -> `{"metrics"}`.
"""

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nanodag.children.fork_server import Line, answering
from nanodag.own_code.functions import function_at
from nanodag.rl.environments.environment import Action, Environment, ToolCall
from nanodag.rl.environments.observations import roles_of


def make(path: str, options: Mapping[str, Any]) -> tuple[Any, Callable[[Line], None]]:
    """The roles of an environment, and what serves an episode. path: `module:Class`."""
    environment = function_at(path)(**options)
    if missing := [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]:
        raise TypeError(f"it has no method {missing[0]}")
    return roles_of(getattr(environment, "roles", None)), answering(partial(_answer, environment))


def _answer(environment: Environment, message: Mapping[str, Any]) -> dict[str, Any]:
    ((name, given),) = message.items()
    return _CALLS[name](environment, given)


def _reset(environment: Environment, given: Mapping[str, Any]) -> dict[str, Any]:
    random.seed(given["seed"])  # a fork seeds it with noise
    observation = environment.reset(seed=given["seed"], record=given["record"])
    tools = getattr(environment, "tools", None)
    return {"observation": observation, "tools": [] if tools is None else tools()}


def _step(environment: Environment, given: Mapping[str, Any]) -> dict[str, Any]:
    calls = tuple(ToolCall(call["name"], call["arguments"]) for call in given["calls"])
    result = environment.step(Action(given["text"], calls, given["is_cut"], given["role"]))
    if not isinstance(result, tuple | list) or len(result) != 4:
        raise ValueError(f"step must return (observation, reward, done, info); found {result!r:.200}")
    return dict(zip(("observation", "reward", "done", "info"), result, strict=True))


def _end(environment: Environment, given: Mapping[str, Any]) -> dict[str, Any]:
    metrics = getattr(environment, "metrics", None)
    return {"metrics": {} if metrics is None else metrics()}


_CALLS = {"reset": _reset, "step": _step, "end": _end}
