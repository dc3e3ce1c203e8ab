"""The advantage of REINFORCE++."""

from torch import Tensor

from nanodag.registry import entry
from nanodag.rl.advantages.whitening import whitened


@entry("advantage", "reinforce_pp")
def reinforce_pp(rewards: Tensor, group_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """A_i = (r_i - mean) / std, over the tokens of the whole batch; groups play no part.

    A group whose rewards are all equal carries a signal here, so the filter `nonzero_spread` takes data away. Contract
    and shapes: nanodag.rl.advantages. Source: REINFORCE++, arXiv:2501.03262, section 3, without discount; verl's
    `reinforce_plus_plus`, OpenRLHF's `reinforce`. KL goes into r_i as a sum over the response, not token by token.
    """
    return whitened(rewards.float().double(), num_tokens).float()
