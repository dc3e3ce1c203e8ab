"""Corrections for what the sampler's weights, kernels or age made different from the trainer's.

Contract: `fn(old_logprobs, sampler_logprobs, mask, sequence_ids, **options) -> weights` (T,) float32 without gradient,
by which the policy loss of a token is multiplied; 0 where the mask is False. With w = exp(old - sampler) of a
token and W = the product of w over the trained tokens of its response:

    tis             min(w, cap)                             bounded, a little biased
    tis_sequence    min(W, cap)                             the same for the whole response
    icepop          w where floor <= w <= cap, else 0       tokens that are far off are left out
    mis             W where floor <= W <= cap, else 0       responses that are far off are left out

Tokens left out stay in the denominators. Exponents are clamped to [-20, 20]. Sources: TIS, F. Yao et al., "Your
efficient RL framework secretly brings you off-policy RL training", 2025; IcePop, "Every step evolves",
arXiv:2510.18855, whose bounds are 0.5 and 5; MIS, J. Liu et al., "When speed kills stability", 2025.
"""

import torch
from torch import Tensor

from nanodag.registry import entry
from nanodag.rl.losses.sequences import sequence_sums


@entry("correction", "none")
def none(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """1 for every trained token."""
    return mask.float()


@entry("correction", "tis")
@torch.no_grad()
def truncated(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor, *, cap: float
) -> Tensor:
    """`min(w, cap)` of a token. As verl's rollout_is=token and TRL's token_truncate."""
    weights = _token_weights(old_logprobs, sampler_logprobs)
    return torch.where(mask, weights.clamp(max=cap), 0.0)


@entry("correction", "tis_sequence")
@torch.no_grad()
def sequence_truncated(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor, *, cap: float
) -> Tensor:
    """`min(W, cap)` of a response. As verl's rollout_is=sequence and TRL's sequence_truncate."""
    weights = _sequence_weights(old_logprobs, sampler_logprobs, mask, sequence_ids)
    return torch.where(mask, weights.clamp(max=cap), 0.0)


@entry("correction", "icepop")
@torch.no_grad()
def token_masked(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor, *, floor: float, cap: float
) -> Tensor:
    """w of a token within the bounds, 0 beyond them.

    As TRL's token_mask, verl's "floor_cap" threshold, OpenRLHF's mask by token.
    """
    weights = _token_weights(old_logprobs, sampler_logprobs)
    return torch.where(mask & (weights >= floor) & (weights <= cap), weights, 0.0)


@entry("correction", "mis")
@torch.no_grad()
def sequence_masked(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor, *, floor: float, cap: float
) -> Tensor:
    """W of a response within the bounds, 0 beyond them.

    As TRL's sequence_mask; OpenRLHF judges by the geometric mean of w, and keeps each token's w.
    """
    weights = _sequence_weights(old_logprobs, sampler_logprobs, mask, sequence_ids)
    return torch.where(mask & (weights >= floor) & (weights <= cap), weights, 0.0)


def _token_weights(old_logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    return (old_logprobs - sampler_logprobs).clamp(-20.0, 20.0).exp()


def _sequence_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    mismatch = sequence_sums(old_logprobs - sampler_logprobs, mask, sequence_ids)
    return mismatch.clamp(-20.0, 20.0).exp()[sequence_ids]
