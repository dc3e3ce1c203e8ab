"""Off-policy sequence masking: bad responses that the policy has left behind are not trained on."""

import torch
from torch import Tensor

from nanodag.rl.losses.sequences import sequence_means


@torch.no_grad()
def off_policy_kept(
    trainer_logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    limit: float,
) -> Tensor:
    """(T,) float32: 0 where A < 0 and the response's mean of sampler - trainer, in nats a token, is above the limit.

    To push down further what the policy hardly samples any more only destabilises it. Tokens left out stay in the
    denominators. Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1; as TRL's off_policy_mask_threshold and slime's
    opsm_delta.
    """
    distance = sequence_means(sampler_logprobs - trainer_logprobs, mask, sequence_ids)[sequence_ids]
    return ((advantages >= 0) | (distance <= limit)).float()
