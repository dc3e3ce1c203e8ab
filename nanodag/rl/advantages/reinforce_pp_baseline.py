"""The advantage of REINFORCE++ with a baseline."""

from torch import Tensor

from nanodag.registry import entry
from nanodag.rl.advantages.groups import group_statistics
from nanodag.rl.advantages.whitening import whitened


@entry("advantage", "reinforce_pp_baseline", compares_groups=True)
def reinforce_pp_baseline(rewards: Tensor, group_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """A_i = (d_i - mean) / std over the tokens of the whole batch, d_i = r_i - mean(group).

    Where lengths differ, the mean of d over tokens is not 0, so a group without spread gets a little of it. Contract
    and shapes: nanodag.rl.advantages. Source: REINFORCE++, arXiv:2501.03262, section 3; verl's
    `reinforce_plus_plus_baseline`, OpenRLHF's `reinforce_baseline`.
    """
    return whitened(group_statistics(rewards, group_ids).centred, num_tokens).float()
