"""The advantage of RLOO."""

from torch import Tensor

from nanodag.registry import entry
from nanodag.rl.advantages.groups import group_statistics


@entry("advantage", "rloo", compares_groups=True)
def rloo(rewards: Tensor, group_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """A_i = r_i - mean of the other members = n / (n - 1) * (r_i - mean(group)).

    Contract, shapes and zeros: nanodag.rl.advantages. Source: RLOO, arXiv:2402.14740, section 2.3.
    """
    group = group_statistics(rewards, group_ids)
    return (group.centred * group.size / (group.size - 1).clamp(min=1)).float()
