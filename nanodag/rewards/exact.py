"""The whole completion equals the answer."""

from collections.abc import Mapping
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.reward import Reward, right_or_wrong


@entry("reward", "exact")
def exact(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when completion and answer are the same text, blanks at both ends aside. An empty answer is never matched."""
    answer = prompt["answer"].strip()
    return right_or_wrong(answer != "" and completion.strip() == answer)
