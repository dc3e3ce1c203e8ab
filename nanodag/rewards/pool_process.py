"""One process of the reward pool.

`python -m nanodag.rewards.pool_process TIMEOUT_S MAX_BYTES SOCKET` reads JSON lines from a socket, answers each by one,
and ends when its other end is closed. MAX_BYTES 0: no limit.
`{"load": name, "options": {...}}` -> `{}` or `{"error"}`;
`{"score": {name: weight}, "samples": [[prompt, completion], ...]}` -> a list of
`{"value", "components", "steps"}` or `{"error"}`. One reward of weight 1 is taken as it is, others are summed.
"""

import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nanodag import registry as entries
from nanodag.children.fork_server import Line
from nanodag.errors import ConfigError
from nanodag.own_code.user_frame import with_place
from nanodag.rewards import time_limit
from nanodag.rewards.reward import Reward, as_reward, combined
from nanodag.worker.children import ignore_stop_signals

_FUNCTIONS: dict[str, Any] = {}  # that are loaded, by name
MAX_TEXT = 1000  # with file and line, or of what a server says


def main() -> None:
    """Serve until the asking end is closed."""
    timeout_s, max_bytes, line = float(sys.argv[1]), int(sys.argv[2]), Line(socket.socket(fileno=int(sys.argv[3])))
    os.set_inheritable(int(sys.argv[3]), False)
    if max_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    ignore_stop_signals()
    for question in line:
        line.send(partial(_answer, question, timeout_s))


def _answer(question: Mapping[str, Any], timeout_s: float) -> Any:
    if "load" in question:
        try:
            _FUNCTIONS[question["load"]] = entries.load("reward", question["load"], question["options"])
        except Exception as error:  # noqa: BLE001 - whatever a module raises when it is imported
            return {"error": str(error)}
        return {}
    weights, samples = question["score"], question["samples"]
    with time_limit.limited(timeout_s * len(samples)):
        by_reward = [_rewards(name, samples) for name in weights]
        return [_score(weights, outcomes, question["how"]) for outcomes in zip(*by_reward, strict=True)]


def _score(weights: Mapping[str, float], found: Sequence[Reward | str], how: Any) -> dict[str, Any]:
    """One sample's answer. found: its reward by each name, or why there is none; one of weight 0 may have none."""
    pairs = list(zip(weights, found, strict=True))
    rewards = {name: outcome for name, outcome in pairs if isinstance(outcome, Reward)}
    failed = {name: outcome[:MAX_TEXT] for name, outcome in pairs if isinstance(outcome, str) and weights[name]}
    if failed:
        is_alone = len(rewards) + len(failed) == 1
        return {"error": "; ".join(why if is_alone else f"{name}: {why}" for name, why in failed.items())}
    weights = {name: weights[name] for name in rewards}
    try:
        is_plain = list(weights.values()) == [1.0]
        reward = next(iter(rewards.values())) if is_plain else combined(weights, list(rewards.values()), how)
    except ValueError as error:  # not finite
        return {"error": str(error) if isinstance(error, ConfigError) else with_place(error)}
    return {
        "value": float(reward.value),
        "components": {k: float(v) for k, v in reward.components.items()},
        "steps": reward.steps,
    }


def _rewards(name: str, samples: Sequence[tuple[Mapping[str, Any], str]]) -> list[Reward | str]:
    function = _FUNCTIONS[name]
    try:
        if hasattr(function, "score_batch"):
            return function.score_batch(samples)
    except Exception as error:  # noqa: BLE001 - as below
        return [_reason(error, function)] * len(samples)
    return [_reward(function, prompt, completion) for prompt, completion in samples]


def _reward(function: Callable[..., Any], prompt: Mapping[str, Any], completion: str) -> Reward | str:
    try:
        return as_reward(function(prompt, completion))
    except Exception as error:  # noqa: BLE001 - a user's function: whatever it raises fails this sample, with the reason
        return _reason(error, function)


def _reason(error: Exception, function: Any) -> str:
    """Type, message, and the line that a user can mend: the deepest of their own, else where their function begins."""
    unwrapped = getattr(function, "function", function)  # of a `group:` or `process:` reward
    return with_place(error, getattr(getattr(unwrapped, "func", unwrapped), "__code__", None))  # func: with options


if __name__ == "__main__":
    main()
