"""The advantage of GRPO."""

from torch import Tensor

from nanodag.registry import entry
from nanodag.rl.advantages.groups import group_statistics

EPSILON = 1e-6


@entry("advantage", "grpo", compares_groups=True, takes_steps=True)
def grpo(rewards: Tensor, group_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """A_i = (r_i - mean(group)) / (std(group) + 1e-6), std unbiased (divided by n - 1).

    Contract, shapes and zeros: nanodag.rl.advantages. Source: DeepSeekMath, arXiv:2402.03300, eq. 4. epsilon as in verl
    (TRL 1e-4, OpenRLHF 1e-9); all three use the unbiased standard deviation.
    """
    group = group_statistics(rewards, group_ids)
    return (group.centred / (group.std + EPSILON)).float()
