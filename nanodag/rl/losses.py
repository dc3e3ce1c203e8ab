"""Losses: pure functions on flat tensors, one entry a token.

T is the number of tokens of a micro-batch, of several responses one after the other. Shared arguments:

    trainer_logprobs     (T,) float32, of the weights being trained; carries the gradient
    old_logprobs         (T,) float32, of the weights at the start of the step
    sampler_logprobs     (T,) float32, as the sampler returned them
    reference_logprobs   (T,) float32, of the frozen reference
    advantages           (T,) float32, one number a response, repeated over its tokens
    mask                 (T,) bool, True = trained
    sequence_ids         (T,) int64, which response of the micro-batch a token belongs to, from 0

ratio = exp(trainer - old); mismatch = old - sampler. Contracts of the entries:

    policy_loss   fn(trainer_logprobs, old_logprobs, advantages, mask, sequence_ids, **options) -> PolicyLoss, with
                  gradient to trainer_logprobs alone. Of the config's options a function gets those that its signature
                  names: clip_low, clip_high, dual_clip, sapo_positive, sapo_negative. Where a loss looks at whole
                  responses, every token of a response must be in the call; packing never splits one.
    kl            fn(trainer_logprobs, reference_logprobs) -> (T,), with gradient to the first
    correction    fn(old_logprobs, sampler_logprobs, mask, sequence_ids, **options) -> weights (T,) float32 without
                  gradient, by which the policy loss of a token is multiplied; 0 where the mask is False
    aggregation   fn(mask, sequence_ids, totals) -> weights (T,) float32, 0 where the mask is False. The loss of an
                  update is the sum of weight * token loss over all its tokens, wherever they are computed: totals are
                  GLOBAL (all ranks, all micro-batches of the update), so any split of the responses gives the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanodag.registry import entry


def sequence_sums(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Sum of each response's trained tokens, at the response's number; (N,) as the tokens, 0 behind the last response.
    A masked token may hold anything.

    No response is without a token, so there is room for all: to ask how many there are is to wait for the device.
    """
    return torch.zeros_like(values).index_add(0, sequence_ids, torch.where(mask, values, 0.0))


def sequence_means(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Mean over each response's trained tokens, at its number, (N,); 0 for a response without one."""
    lengths = sequence_sums(torch.ones_like(values), mask, sequence_ids)
    return sequence_sums(values, mask, sequence_ids) / lengths.clamp(min=1.0)


def _exp(log_ratio: Tensor) -> Tensor:
    """exp of the log ratio clamped to [-20, 20], so that it stays finite."""
    return log_ratio.clamp(-20.0, 20.0).exp()


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """values: (T,) float32. ratio: (T,) float32, without gradient: what weighs the token, before any bound. clipped:
    (T,) bool: tokens on which a bound acts."""

    values: Tensor
    ratio: Tensor
    clipped: Tensor


def _bounded(advantages: Tensor, ratio: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """The higher loss of a ratio and of the same within its bounds, (T,), and where the bound is what counts."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(plain, bounded), bounded > plain


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
    ratio = _exp(trainer_logprobs - old_logprobs)
    values, clipped = _bounded(advantages, ratio, clip_low, clip_high)
    if dual_clip:
        ceiling = -advantages * dual_clip
        beyond = (advantages < 0) & (values > ceiling)
        values = torch.where(beyond, ceiling, values)
        clipped = clipped | beyond
    return PolicyLoss(values=values, ratio=ratio.detach(), clipped=clipped & mask)


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
    log_ratio = sequence_means((trainer_logprobs - old_logprobs).detach(), mask, sequence_ids)
    sequence_ratio = _exp(log_ratio)[sequence_ids]
    ratio = sequence_ratio * (trainer_logprobs - trainer_logprobs.detach()).exp()
    values, clipped = _bounded(advantages, ratio, clip_low, clip_high)
    return PolicyLoss(values=values, ratio=sequence_ratio, clipped=clipped & mask)


@entry("policy_loss", "cispo")
def cispo(
    trainer_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * trainer_logprob, sg for no gradient.

    REINFORCE with a bounded importance weight: no token's gradient is lost. The paper has no lower bound: clip_low of 1
    says that. TRL's `epsilon_high` e is the bound itself: clip_low 1, clip_high e - 1; verl's are ours. log ratio is
    clamped to [-20, 20]. Source: MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5.
    """
    ratio = _exp(trainer_logprobs.detach() - old_logprobs)
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(values=-bounded * advantages * trainer_logprobs, ratio=ratio, clipped=(bounded != ratio) & mask)


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
    ratio = _exp(trainer_logprobs - old_logprobs)
    temperature = torch.where(advantages > 0, sapo_positive, sapo_negative)
    gate = torch.sigmoid(temperature * (ratio - 1.0)) * (4.0 / temperature)
    return PolicyLoss(values=-advantages * gate, ratio=ratio.detach(), clipped=torch.zeros_like(mask))


@entry("policy_loss", "reinforce")
def reinforce(
    trainer_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, sequence_ids: Tensor
) -> PolicyLoss:
    """-A * trainer_logprob: no ratio, no bound.

    Right on policy: with several updates a step, or stale rollouts, the later ones are off policy and nothing here
    corrects for it. Source: Williams, 1992; verl's `gpg` and its `compute_policy_loss_reinforce`.
    """
    ratio = _exp(trainer_logprobs.detach() - old_logprobs)
    return PolicyLoss(values=-advantages * trainer_logprobs, ratio=ratio, clipped=torch.zeros_like(mask))


# KL(policy || reference) from one sampled token, x = trainer - reference. All estimators have the expectation KL under
# the policy (k2 up to third order). Used in the loss, their gradients differ: that of k2 is the unbiased one of the KL
# on policy, that of k1 has expectation 0. Source: J. Schulman, "Approximating KL divergence", 2020; low_var as verl's
# `low_var_kl` and slime's.


@entry("kl", "k1")
def k1(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """x: unbiased, may be negative, much variance."""
    return trainer_logprobs - reference_logprobs


@entry("kl", "k2")
def k2(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """x^2 / 2: never negative, biased."""
    return (trainer_logprobs - reference_logprobs).square() / 2


@entry("kl", "k3")
def k3(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(-x) - 1 + x: unbiased, never negative; overflows when the two are far apart. The one of the GRPO paper."""
    x = trainer_logprobs - reference_logprobs
    return (-x).expm1() + x


@entry("kl", "low_var")
def low_var(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """k3 of x clamped to [-20, 20], the result clamped to at most 10, where its gradient ends."""
    x = (trainer_logprobs - reference_logprobs).clamp(-20.0, 20.0)
    return ((-x).expm1() + x).clamp(-10.0, 10.0)


def unbiased(estimates: Tensor, trainer_logprobs: Tensor, reference_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """ratio * estimate, its gradient ratio * x: in expectation under old, the KL and the gradient of the KL.

    Whatever the kind, the gradient is that of the KL, off policy too; the kinds differ in the value that is logged. For
    k3 both are exactly what ratio * k3 gives when it is differentiated as it stands. x is clamped to [-20, 20], the
    ratio's exponent too. Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1; TRL's use_bias_correction_kl, slime's
    use_unbiased_kl; OpenRLHF has the gradient, with the ratio at most 10, and leaves the value unweighted.
    """
    x = (trainer_logprobs - reference_logprobs).detach().clamp(-20.0, 20.0)
    ratio = _exp(trainer_logprobs.detach() - old_logprobs)
    return ratio * (estimates.detach() + x * (trainer_logprobs - trainer_logprobs.detach()))


# Corrections for a difference between sampler and trainer by weights, kernels or age. With w = exp(old - sampler) of a
# token and W = the product of w over the trained tokens of its response:
#
#     tis             w within [floor, cap]                   bounded, a little biased
#     tis_sequence    W within [floor, cap]                   the same for the whole response
#     icepop          w where floor <= w <= cap, else 0       tokens that are far off are left out
#     mis             W where floor <= W <= cap, else 0       responses that are far off are left out
#     mis_geometric   G where floor <= G <= cap, else 0       the same by the geometric mean of w, G
#
# `not_vetoed` leaves out responses with one token that is far off, on top of any of them. Tokens left out stay in the
# denominators. Exponents are clamped to [-20, 20]. Sources: TIS, F. Yao et al., "Your efficient RL framework secretly
# brings you off-policy RL training", 2025; IcePop, "Every step evolves", arXiv:2510.18855, whose bounds are 0.5 and 5;
# MIS, J. Liu et al., "When speed kills stability", 2025.


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
    weights = _exp(old_logprobs - sampler_logprobs)
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
    return _where_between(_exp(old_logprobs - sampler_logprobs), mask, floor, cap)


@entry("correction", "mis")
@torch.no_grad()
def sequence_masked(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor, *, floor: float, cap: float
) -> Tensor:
    """W of a response within the bounds, 0 beyond them. As TRL's sequence_mask."""
    return _where_between(_sequence_weights(old_logprobs, sampler_logprobs, mask, sequence_ids), mask, floor, cap)


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
    return _where_between(_exp(means)[sequence_ids], mask, floor, cap)


@torch.no_grad()
def not_vetoed(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor, *, veto: float
) -> Tensor:
    """(T,) float32: 0 for a response with a trained token whose w is below `veto`, else 1.

    Such a token is one that the trainer would hardly ever sample: what came after it has no place in an update. As
    slime's rs_veto_threshold (examples/train_infer_mismatch_helper).
    """
    is_far = (_exp(old_logprobs - sampler_logprobs) < veto).float()
    return (sequence_sums(is_far, mask, sequence_ids)[sequence_ids] == 0).float()


def _sequence_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    return _exp(sequence_sums(old_logprobs - sampler_logprobs, mask, sequence_ids))[sequence_ids]


def _where_between(weights: Tensor, mask: Tensor, floor: float, cap: float) -> Tensor:
    return torch.where(mask & (weights >= floor) & (weights <= cap), weights, 0.0)


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


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over one whole update: every rank and every micro-batch.

    num_tokens: trained tokens. num_sequences: responses with at least one trained token; a fully masked response is
    not counted (as in verl and OpenRLHF; TRL counts it). max_tokens: longest response that the config allows.
    """

    num_tokens: int
    num_sequences: int
    max_tokens: int


@entry("aggregation", "token")
def by_token(mask: Tensor, sequence_ids: Tensor, totals: Totals) -> Tensor:
    """w = 1 / num_tokens: every token counts the same, so long responses count more.

    Source: DAPO, arXiv:2503.14476, eq. 12.
    """
    return mask.float() / max(totals.num_tokens, 1)


@entry("aggregation", "sequence")
def by_sequence(mask: Tensor, sequence_ids: Tensor, totals: Totals) -> Tensor:
    """w = 1 / (num_sequences * trained tokens of the response): every response counts the same.

    A response must lie in one micro-batch. Source: DeepSeekMath, arXiv:2402.03300, eq. 3.
    """
    lengths = sequence_sums(mask.float(), mask, sequence_ids)
    return mask.float() / (lengths[sequence_ids].clamp(min=1.0) * max(totals.num_sequences, 1))


@entry("aggregation", "constant")
def by_constant(mask: Tensor, sequence_ids: Tensor, totals: Totals) -> Tensor:
    """w = 1 / (num_sequences * max_tokens): no length in the denominator, so none is favoured.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.1; TRL's loss_type="dr_grpo".
    """
    return mask.float() / (max(totals.num_sequences, 1) * totals.max_tokens)
