"""The plain policy gradient."""

import torch
from torch import Tensor

from nanodag.registry import entry
from nanodag.rl.losses.policy_loss import PolicyLoss


@entry("policy_loss", "reinforce")
def reinforce(
    trainer_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, sequence_ids: Tensor
) -> PolicyLoss:
    """-A * trainer_logprob: no ratio, no bound.

    Right on policy: with several updates a step, or stale rollouts, the later ones are off policy and nothing here
    corrects for it. Source: Williams, 1992; verl's `gpg` and its `compute_policy_loss_reinforce`.
    """
    ratio = (trainer_logprobs.detach() - old_logprobs).clamp(-20.0, 20.0).exp()
    return PolicyLoss(values=-advantages * trainer_logprobs, ratio=ratio, clipped=torch.zeros_like(mask))
