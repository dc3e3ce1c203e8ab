"""The policy loss of SAPO: a soft gate instead of a clip."""

import torch
from torch import Tensor

from nanodag.registry import entry
from nanodag.rl.losses.policy_loss import PolicyLoss


@entry("policy_loss", "sapo")
def sapo(
    trainer_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    sapo_positive: float = 1.0,
    sapo_negative: float = 1.05,
) -> PolicyLoss:
    """-A * 4 / tau * sigmoid(tau * (ratio - 1)), tau = sapo_positive where A > 0, else sapo_negative.

    The gradient is that of -A * ratio at ratio 1, and fades smoothly on both sides; a larger tau fades sooner. Nothing
    is clipped. log ratio is clamped to [-20, 20]. Source: SAPO, arXiv:2511.20347; the defaults are its.
    """
    ratio = (trainer_logprobs - old_logprobs).clamp(-20.0, 20.0).exp()
    temperature = torch.where(advantages > 0, sapo_positive, sapo_negative)
    gate = torch.sigmoid(temperature * (ratio - 1.0)) * (4.0 / temperature)
    return PolicyLoss(values=-advantages * gate, ratio=ratio.detach(), clipped=torch.zeros_like(mask))
