"""The clipped policy loss of PPO and GRPO, with clip-higher and dual clip."""

import torch
from torch import Tensor

from nanodag.registry import entry
from nanodag.rl.losses.policy_loss import PolicyLoss


@entry("policy_loss", "ppo_clip")
def ppo_clip(
    trainer_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> PolicyLoss:
    """max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high)); dual_clip c above 0: at most -A * c where A < 0.

    log ratio is clamped to [-20, 20] first (as in verl), so that it stays finite. Source: PPO, arXiv:1707.06347, eq. 7;
    clip-higher: DAPO, arXiv:2503.14476, eq. 10; dual clip (c > 1, usually 3): arXiv:1912.09729, eq. 5.
    """
    ratio = (trainer_logprobs - old_logprobs).clamp(-20.0, 20.0).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    values = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip:
        ceiling = -advantages * dual_clip
        beyond = (advantages < 0) & (values > ceiling)
        values = torch.where(beyond, ceiling, values)
        clipped = clipped | beyond
    return PolicyLoss(values=values, ratio=ratio.detach(), clipped=clipped & mask)
