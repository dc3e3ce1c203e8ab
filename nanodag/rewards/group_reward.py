"""`group:module:function`: a reward that compares the answers to one prompt with one another.

    def function(prompt, completions) -> list of numbers or Reward, one for each completion, in their order

Each gets the whole group at once; a function that raises or hangs fails the whole group.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nanodag.own_code.functions import function_at
from nanodag.registry import entry
from nanodag.rewards.reward import Reward


@entry("reward", "group", argument="function")
class GroupReward:
    """Calls a user's function on whole groups. Raises ImportError or AttributeError when there is no such function."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.function = function_at(path)

    def score_batch(self, samples: Sequence[tuple[Mapping[str, Any], str]]) -> list[Reward]:
        """The rewards of one group. Raises ValueError when the function returns another number of them."""
        rewards = list(self.function(samples[0][0], [completion for _, completion in samples]))
        if len(rewards) != len(samples):
            raise ValueError(f"{self._path} returned {len(rewards)} rewards for {len(samples)} answers")
        return [reward if isinstance(reward, Reward) else Reward(float(reward)) for reward in rewards]
