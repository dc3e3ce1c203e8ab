"""A reward pool as tests ask it: sample by sample, and ended with its block."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from nanodag.rewards.reward import Reward
from nanodag.rewards.reward_pool import RewardPool


class Pool(RewardPool):
    def submit(self, prompt: Mapping[str, Any], completion: str) -> "Future[Reward | str]":
        return self.submit_group(prompt, [completion])[0]

    def score(self, samples: Sequence[tuple[Mapping[str, Any], str]]) -> list[Reward | str]:
        """Scores of (prompt, completion) pairs, in their order."""
        return [future.result() for future in [self.submit(prompt, completion) for prompt, completion in samples]]

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
