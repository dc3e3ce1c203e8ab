"""Rewards by functions of the user's that get more than one answer, or give more than one score.

    group:module:function     function(prompt, completions) -> list of numbers or Reward, one for each completion
    process:module:function   function(prompt, completion) -> (total, [(end, score), ...])

completion[:end] is what was written when a step was done. docs/how-to/reward.md says what becomes of either.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanodag.own_code.functions import function_at
from nanodag.registry import entry
from nanodag.rewards.reward import Reward, as_reward


class _OfFunction:
    """A reward by a user's function. Raises ImportError or AttributeError when there is no such function."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.function = function_at(path)


@entry("reward", "group", argument="function")
class GroupReward(_OfFunction):
    """Calls a user's function on whole groups."""

    def score_batch(self, samples: Sequence[tuple[Mapping[str, Any], str]]) -> list[Reward]:
        """The rewards of one group. Raises ValueError when the function returns another number of them."""
        rewards = list(self.function(samples[0][0], [completion for _, completion in samples]))
        if len(rewards) != len(samples):
            raise ValueError(f"{self._path} returned {len(rewards)} rewards for {len(samples)} answers")
        return list(map(as_reward, rewards))


@entry("reward", "process", argument="function", scores_steps=True)
class Steps(_OfFunction):
    """Calls a user's function."""

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> Reward:
        """The total, and each step's end and score. Raises ValueError for a step that ends outside the completion."""
        total, scored_steps = self.function(prompt, completion)
        steps = [(int(end), float(score)) for end, score in scored_steps]
        if outside := [end for end, _ in steps if not 1 <= end <= len(completion)]:
            raise ValueError(
                f"{self._path} found a step that ends at character {outside[0]} of a completion of {len(completion)}"
            )
        return Reward(float(total), steps=steps)


def token_places(
    steps: Sequence[tuple[int, float]], ids: Sequence[int], *, text: str, decode: Callable[[Sequence[int]], str]
) -> list[tuple[int, float]]:
    """For each step the place in `ids` of the token that ends it, and its score. steps: ends in characters of `text`,
    which `decode` makes of `ids`, a stop token at their end left out.

    A token that ends one step and begins the next belongs to the first, one that is only a part of a step's last
    character is not its end, and a stop token belongs to a step that ends with the text.
    """
    last = len(ids) - 1
    return [(last if end == len(text) else _place(end, ids, text, decode), score) for end, score in steps]


def _place(end: int, ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> int:
    """The first place up to which the ids spell text[:end], by halving: once they do, they do with more of them."""
    return bisect_left(range(1, len(ids)), True, key=lambda size: decode(ids[:size])[:end] == text[:end])
