"""The advantage of Dr. GRPO."""

from torch import Tensor

from nanodag.registry import entry
from nanodag.rl.advantages.groups import group_statistics


@entry("advantage", "dr_grpo", compares_groups=True)
def dr_grpo(rewards: Tensor, group_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """A_i = r_i - mean(group): not divided by the standard deviation, which favours very easy and very hard prompts.

    Contract, shapes and zeros: nanodag.rl.advantages. Source: Dr. GRPO, arXiv:2503.20783, section 3.1. Its loss divides
    by a constant instead of by lengths: choose the aggregation `constant` with it.
    """
    return group_statistics(rewards, group_ids).centred.float()
