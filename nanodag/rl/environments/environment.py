"""The interface of an environment, and what its methods get. Standard library only.

    class Echo:
        def __init__(self, *, rounds: int = 2):        # options of the config, keyword only
            self.rounds = rounds

        def reset(self, *, seed, record):              # an episode begins
            self.left = self.rounds
            return "Say something."

        def step(self, action):                        # the policy has spoken
            self.left -= 1
            return f"You said {action.text}.", 0.5, self.left == 0, {}

`tools()` returns the tools that the policy may call, each as OpenAI defines it; `metrics()` numbers to log when an
episode has ended. Both may be left out.

An observation is what the policy hears: a text; a list of messages `{"role": ..., "content": ...}`; or
`{"to": role, "messages": ...}` where several roles speak. A text answers the tool call of the action, where it made
one, else it is a user's message. With several calls a list of texts answers each. None in `reset`: the prompt's own
messages.

A reward is a number, or numbers by role. The rewards of an episode's steps add up. `info` is a mapping; of its items
`components`, named parts of the reward, add up too.

Several roles: `roles = {"solver": True, "judge": False}`, each with whether it is trained. The first is the main one:
its rewards are the sample's. `{"to": "judge", "messages": [...], "anew": True}` begins its conversation again.

The seed follows from the prompt: the samples of a group begin in the same state. An episode that
depends on seed, record and actions alone can be resumed exactly. Python's `random` is
seeded with the seed, and its hashes are the same in each process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Observation = str | Sequence[str] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | None


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


class Environment(Protocol):
    """Methods that an environment's class needs; `tools`, `metrics` and `roles` are optional."""

    def reset(self, *, seed: int, record: Mapping[str, Any]) -> Observation:
        """Begin an episode, and say what the policy hears first. record: the prompt's (nanodag.data.records)."""
        ...

    def step(self, action: Action) -> tuple[Observation, float | Mapping[str, float], bool, Mapping[str, Any]]:
        """(observation, reward, done, info). When it is done nobody hears the observation."""
        ...
