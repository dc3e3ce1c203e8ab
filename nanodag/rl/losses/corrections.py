"""Corrections for what the sampler's weights, kernels or age made different from the trainer's.

Contract: `fn(old_logprobs, sampler_logprobs, mask, sequence_ids, **options) -> weights` (T,) float32 without gradient,
by which the policy loss of a token is multiplied; 0 where the mask is False. With w = exp(old - sampler) of a
token and W = the product of w over the trained tokens of its response:

    tis             w within [floor, cap]                   bounded, a little biased
    tis_sequence    W within [floor, cap]                   the same for the whole response
    icepop          w where floor <= w <= cap, else 0       tokens that are far off are left out
    mis             W where floor <= W <= cap, else 0       responses that are far off are left out
    mis_geometric   G where floor <= G <= cap, else 0       the same by the geometric mean of w, G

`not_vetoed` leaves out responses with one token that is far off, on top of any of them. Tokens left out stay in the
denominators. Exponents are clamped to [-20, 20]. Sources: TIS, F. Yao et al., "Your
efficient RL framework secretly brings you off-policy RL training", 2025; IcePop, "Every step evolves",
arXiv:2510.18855, whose bounds are 0.5 and 5; MIS, J. Liu et al., "When speed kills stability", 2025.
"""

import torch
from torch import Tensor

from nanodag.registry import entry
from nanodag.rl.losses.sequences import sequence_means, sequence_sums


@entry("correction", "none")
def none(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """1 for every trained token."""
    return mask.float()


@entry("correction", "tis")
@torch.no_grad()
def truncated(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor, *, floor: float, cap: float
) -> Tensor:
    """`max(min(w, cap), floor)` of a token. At floor 0 as verl's rollout_is=token and TRL's token_truncate; slime's
    tis_clip_low is the floor."""
    weights = _token_weights(old_logprobs, sampler_logprobs)
    return torch.where(mask, weights.clamp(floor, cap), 0.0)


@entry("correction", "tis_sequence")
@torch.no_grad()
def sequence_truncated(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor, *, floor: float, cap: float
) -> Tensor:
    """`max(min(W, cap), floor)` of a response. At floor 0 as verl's rollout_is=sequence, TRL's sequence_truncate."""
    weights = _sequence_weights(old_logprobs, sampler_logprobs, mask, sequence_ids)
    return torch.where(mask, weights.clamp(floor, cap), 0.0)


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
    """W of a response within the bounds, 0 beyond them. As TRL's sequence_mask."""
    weights = _sequence_weights(old_logprobs, sampler_logprobs, mask, sequence_ids)
    return torch.where(mask & (weights >= floor) & (weights <= cap), weights, 0.0)


@entry("correction", "mis_geometric")
@torch.no_grad()
def geometric_masked(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor, *, floor: float, cap: float
) -> Tensor:
    """The geometric mean of w over a response within the bounds, 0 beyond them.

    Unlike the product it does not grow with the response's length, so the bounds are close to 1. As slime's level
    `geometric`; OpenRLHF's mask and verl's seq_mean_k1 judge by it too, and keep other weights.
    """
    means = sequence_means(old_logprobs - sampler_logprobs, mask, sequence_ids)
    weights = means.clamp(-20.0, 20.0).exp()[sequence_ids]
    return torch.where(mask & (weights >= floor) & (weights <= cap), weights, 0.0)


@torch.no_grad()
def not_vetoed(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor, *, veto: float
) -> Tensor:
    """(T,) float32: 0 for a response with a trained token whose w is below `veto`, else 1.

    Such a token is one that the trainer would hardly ever sample: what came after it has no place in an update. As
    slime's rs_veto_threshold (examples/train_infer_mismatch_helper).
    """
    is_far = (_token_weights(old_logprobs, sampler_logprobs) < veto).float()
    return (sequence_sums(is_far, mask, sequence_ids)[sequence_ids] == 0).float()


def _token_weights(old_logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    return (old_logprobs - sampler_logprobs).clamp(-20.0, 20.0).exp()


def _sequence_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    mismatch = sequence_sums(old_logprobs - sampler_logprobs, mask, sequence_ids)
    return mismatch.clamp(-20.0, 20.0).exp()[sequence_ids]
