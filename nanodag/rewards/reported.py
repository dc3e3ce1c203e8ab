"""The reward that whoever made the response says itself: a `generate` function, an environment, an agent."""

from collections.abc import Mapping
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.reward import Reward

REPORTED = "reported"  # of a prompt's record, as a reward gets it: {"value": 0.5, "components": {...}} or None


@entry("reward", "reported", is_of_generate=True)
def reported(prompt: Mapping[str, Any], completion: str) -> Reward:
    """What the `generate` function reported of the sample. A sample of which nothing was reported fails."""
    said = prompt.get(REPORTED)
    if said is None:
        raise ValueError("reported none")
    return Reward(float(said["value"]), {name: float(value) for name, value in said["components"].items()})
