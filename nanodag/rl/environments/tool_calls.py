"""The tool calls of a policy's message, as an environment gets them. Standard library only."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def ids_of(message: Mapping[str, Any]) -> list[str]:
    """The ids of a message's calls."""
    return [call["id"] for call in message.get("tool_calls", ())]


def given(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each call's `name` and `arguments`; of calls of which none is wrong."""
    return [{"name": function["name"], "arguments": _arguments(function)} for function in _functions(message)]


def wrong(message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """How each call is answered where one of them is wrong; empty where none is. tools: that there are."""
    names = [tool["function"]["name"] for tool in tools]
    found = [_wrong(function, names) for function in _functions(message)]
    return [f"error: {what or 'not called, as another call is wrong'}" for what in found] if any(found) else []


def _functions(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", ())]


def _arguments(function: Mapping[str, Any]) -> Any:
    return json.loads(function["arguments"] or "{}")


def _wrong(function: Mapping[str, Any], names: Sequence[str]) -> str:
    if function["name"] not in names:
        return f"there is no tool {function['name'][:80]!r}; there is {', '.join(names)}"
    return "" if isinstance(_arguments(function), dict) else "the arguments must be a JSON object"
