"""On-policy distillation: what a teacher thinks of each token, beside what the reward says of the response."""

import torch
from torch import Tensor

LOWEST = -30.0


@torch.no_grad()
def distilled(
    advantages: Tensor, old_logprobs: Tensor, teacher_logprobs: Tensor, *, coefficient: float
) -> tuple[Tensor, Tensor]:
    """A_t - coefficient * k_t, and k_t = old_t - teacher_t, (N,) float32 each.

    k_t is the one-sample estimate of KL(policy || teacher) at token t, the reverse KL: on policy, the policy gradient
    of -k_t descends it, token by token, without looking at what k_t does to later tokens (a discount of 0). A
    negligible chance that the teacher gives a token counts as exp(-30), so that one token cannot outweigh all others.

    It is added after advantages were normalised, so the coefficient does not depend on the spread of rewards.

    Source: MiniLLM, arXiv:2306.08543 (the reverse KL, on samples of the student); in the advantage, token by token, as
    in K. Lu and Thinking Machines, "On-policy distillation", 2025, and slime's --use-opd.
    """
    reverse_kl = old_logprobs - teacher_logprobs.clamp(min=LOWEST)
    return advantages - coefficient * reverse_kl, reverse_kl
