"""The policy loss of GSPO: one ratio for a whole response."""

import torch
from torch import Tensor

from nanodag.registry import entry
from nanodag.rl.losses.policy_loss import PolicyLoss
from nanodag.rl.losses.sequences import sequence_means


@entry("policy_loss", "gspo")
def gspo(
    trainer_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """max(-A * s, -A * clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean over the response of trainer - old).

    s has its value from the response and its gradient from each token by itself (the paper's GSPO-token, with
    sg for no gradient: sg(s) * exp(trainer - sg(trainer))). Values and gradients summed over a response equal those of
    the paper's sequence form, whichever aggregation follows, and a token may have a weight of its own. The mean is over
    trained tokens. log s is clamped to [-20, 20]. The paper's bounds are small, 3e-4 and 4e-4, and its aggregation is
    `sequence`. Source: GSPO, arXiv:2507.18071, eqs. 5 to 7, 13 and 14.
    """
    log_ratio = sequence_means((trainer_logprobs - old_logprobs).detach(), mask, sequence_ids).clamp(-20.0, 20.0)
    sequence_ratio = log_ratio.exp()[sequence_ids]
    ratio = sequence_ratio * (trainer_logprobs - trainer_logprobs.detach()).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(
        values=torch.maximum(plain, bounded), ratio=sequence_ratio, clipped=(bounded > plain).detach() & mask
    )
