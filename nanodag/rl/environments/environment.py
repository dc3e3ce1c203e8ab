"""The interface of an environment, how a fork of its process serves an episode, and checks of its answers, as a program
may answer anything. Standard library only.

    class Echo:
        def __init__(self, *, rounds: int = 2):        # options of the config, keyword only
            self.rounds = rounds

        def reset(self, *, seed, record):              # an episode begins; returns an observation
            self.left = self.rounds
            return "Say something."

        def step(self, action):                        # the policy has spoken; observation, reward, done, info
            self.left -= 1
            return f"You said {action.text}.", 0.5, self.left == 0, {}

docs/how-to/environment.md says what each of these may be, and what `tools`, `metrics` and `roles` are. A text answers
the tool call of the action, where it made one, else it is a user's message. An episode that depends on seed, record and
actions alone can be resumed exactly.

A fork answers `{"reset": {"seed", "record"}}` with `{"observation", "tools"}`; `{"step": {"text", "calls", "is_cut",
"role"}}` with `{"observation", "reward", "done", "info"}`; `{"end": {}}` with `{"metrics"}`.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nanodag.children.fork_server import Line, answering
from nanodag.own_code.functions import function_at

MAKE = f"{__name__}:make"
Observation = str | Sequence[str] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | None
Message = dict[str, Any]
MAX_ROLES = 16


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call. name: of a tool that the environment has. arguments: by name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """Speech of a role. text: without its calls. calls: those of tools that the environment has, with arguments that
    are JSON objects; other calls are answered before they reach the environment. is_cut: the text reached the token
    limit, and this is the last step. role: who spoke; empty where the environment has no roles."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    is_cut: bool = False
    role: str = ""


def make(path: str, options: Mapping[str, Any]) -> tuple[Any, Callable[[Line], None]]:
    """The roles of an environment, and what serves an episode. path: `module:Class`."""
    environment = function_at(path)(**options)
    if missing := [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]:
        raise TypeError(f"it has no method {missing[0]}")
    return roles_of(getattr(environment, "roles", None)), answering(partial(_answer, environment))


def _answer(environment: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    ((name, payload),) = message.items()
    if name == "reset":
        random.seed(payload["seed"])  # a fork seeds it with noise
        observation = environment.reset(seed=payload["seed"], record=payload["record"])
        tools = getattr(environment, "tools", None)
        return {"observation": observation, "tools": [] if tools is None else tools()}
    if name == "step":
        calls = tuple(ToolCall(call["name"], call["arguments"]) for call in payload["calls"])
        result = environment.step(Action(payload["text"], calls, payload["is_cut"], payload["role"]))
        if not isinstance(result, tuple | list) or len(result) != 4:
            raise ValueError(f"step must return (observation, reward, done, info); found {result!r:.200}")
        return dict(zip(("observation", "reward", "done", "info"), result, strict=True))
    metrics = getattr(environment, "metrics", None)
    return {"metrics": {} if metrics is None else metrics()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """An observation. role: who hears it, and speaks next. messages: what is new to it; None for the prompt's own.
    is_anew: its conversation begins with them."""

    role: str
    messages: list[Message] | None
    is_anew: bool = False


@dataclass(slots=True, kw_only=True)
class Earned:
    """Rewards of the steps so far. by_role: rewards; "" is the main role. components: parts of the reward."""

    by_role: dict[str, float] = field(default_factory=dict)
    components: dict[str, float] = field(default_factory=dict)

    def add(self, reward: Any, info: Any, roles: Sequence[str]) -> None:
        """Add those of a step. roles: of the environment, the main one first. Raises ValueError for what is no finite
        number, or of no role."""
        rewards = reward if isinstance(reward, Mapping) else {roles[0]: reward}
        for role, value in rewards.items():
            if role not in roles:
                raise ValueError(f"a reward is for the role {role!r:.80}; the roles are {', '.join(roles)}")
            self.by_role[role] = self.by_role.get(role, 0.0) + number(value, f"the reward of {role or 'a step'}")
        components = _mapping(info, "info").get("components", {})
        for name, value in _mapping(components, "components").items():
            self.components[name] = self.components.get(name, 0.0) + number(value, f"the component {name:.80}")


def roles_of(found: Any) -> dict[str, bool]:
    """Roles that speak, and whether each is trained, from an environment's `roles`; one without a name where it says
    nothing. Raises ValueError for anything else, and where none is trained."""
    if found is None:
        return {"": True}
    roles = _mapping(found, "roles")
    if not 0 < len(roles) <= MAX_ROLES or not all(roles) or not all(isinstance(v, bool) for v in roles.values()):
        raise ValueError(f"roles must be names, each with whether it is trained; found {found!r:.200}")
    if not any(roles.values()):
        raise ValueError(f"roles {found!r:.200}: none of them is trained")
    return roles


def heard(found: Any, roles: Sequence[str], speaker: str, call_ids: Sequence[str], *, may_be_none: bool) -> Heard:
    """An observation. speaker: who spoke last, and hears it if nothing else is said. call_ids: of the calls that it
    answers. Raises ValueError for what is no observation."""
    is_anew, role = False, speaker
    if isinstance(found, Mapping):
        if not {"to", "messages"} <= found.keys() <= {"to", "messages", "anew"}:
            raise ValueError(f"an observation has `to`, `messages` and perhaps `anew`; found {sorted(found)!r:.200}")
        role, is_anew = found["to"], found.get("anew", False)
        if role not in roles or not isinstance(is_anew, bool):
            raise ValueError(f"an observation is to {role!r:.80}, anew {is_anew!r:.80}; roles are {', '.join(roles)}")
        found = found["messages"]
    if found is None and may_be_none:
        return Heard(role=role, messages=None, is_anew=is_anew)
    return Heard(role=role, messages=_messages(found, call_ids if role == speaker else ()), is_anew=is_anew)


def _messages(found: Any, call_ids: Sequence[str]) -> list[Message]:
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not texts:
        raise ValueError(f"an observation is a text, or a list of texts or messages; found {found!r:.200}")
    if all(isinstance(text, str) for text in texts):
        if call_ids and len(texts) != len(call_ids):
            raise ValueError(f"{len(call_ids)} calls were answered by {len(texts)} texts; give one for each")
        if call_ids:
            return list(map(tool_message, call_ids, texts))
        return [{"role": "user", "content": text} for text in texts]
    unanswered = list(call_ids)
    return [_message(message, unanswered) for message in texts]


def _message(found: Any, unanswered: list[str]) -> Message:
    message = _mapping(found, "a message")
    role, content = message.get("role"), message.get("content")
    if message.keys() - {"role", "content"} or role not in ("system", "user", "tool") or not isinstance(content, str):
        raise ValueError(f"a message has a role (system, user, tool) and a text as content; found {found!r:.200}")
    if role != "tool":
        return {"role": role, "content": content}
    if not unanswered:
        raise ValueError("there are more messages of the role tool than calls")
    return tool_message(unanswered.pop(0), content)


def tool_message(call_id: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def tool_named(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's form. parameters: a JSON schema."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def tools_of(found: Any) -> list[dict[str, Any]]:
    """Check the result of `tools()`. Raises ValueError where it is no list of tools as OpenAI defines them."""
    if not isinstance(found, list):
        raise ValueError(f"tools must be a list; found {found!r:.200}")
    for tool in found:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f'a tool is {{"type": "function", "function": {{"name": ...}}}}; found {tool!r:.200}')
        if not isinstance(function.get("parameters", {}), dict):
            raise ValueError(f"the parameters of {function['name']} are a JSON schema; found {tool!r:.200}")
    return found


def metrics_of(found: Any) -> dict[str, float]:
    """Check the result of `metrics()`. Raises ValueError where it is no mapping of finite numbers."""
    return {name: number(value, f"the metric {name:.80}") for name, value in _mapping(found, "metrics").items()}


def number(value: Any, what: str) -> float:
    """A finite number. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} is {value!r:.80}; it must be a finite number")
    return float(value)


def _mapping(found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{what} must be a mapping; found {found!r:.200}")
    return found
