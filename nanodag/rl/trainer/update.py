"""One micro-batch's share of an update's loss, and the numbers that are logged about it.

    loss = sum over tokens of w * (c * policy loss + kl_coefficient * KL - entropy_coefficient * entropy)

w from the aggregation, made with totals over the whole update; c from the off-policy correction (sampler against old)
and off-policy sequence masking. With `kl_in: reward` the KL is taken off the rewards instead.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanodag.config.kinds.rl import RLStage
from nanodag.rl.losses.aggregation import Totals
from nanodag.rl.losses.kl import unbiased
from nanodag.rl.losses.opsm import off_policy_kept
from nanodag.rl.losses.sequences import sequence_sums
from nanodag.rl.rollouts.metrics import Sums
from nanodag.rl.trainer.policy import DeviceRow


class PolicyObjective:
    """The loss that a config chose, its entries loaded. kl: the estimator of a token's KL (nanodag.rl.losses.kl)."""

    def __init__(self, config: RLStage) -> None:
        self._algorithm = algorithm = config.algorithm
        self._policy_loss = algorithm.load(algorithm.policy_loss)
        self._aggregation = algorithm.aggregation.load()
        self.kl = algorithm.kl_kind.load()
        self._correction = algorithm.load(algorithm.correction)

    def __call__(self, scored: "Scored", totals: Totals) -> tuple[Tensor, Sums]:
        """The share of the loss, to be summed over micro-batches and ranks, and sums over its trained tokens."""
        algorithm, row, mask = self._algorithm, scored.row, scored.row.mask
        policy = self._policy_loss(
            scored.trainer_logprobs, scored.old_logprobs, scored.advantages, mask, row.sequence_ids
        )
        weights = self._weights(scored)
        per_token = policy.values * weights
        kl = None
        if scored.reference_logprobs is not None:
            is_trained = algorithm.kl_in == "loss" and algorithm.kl_coefficient > 0
            # A KL that is only logged stays out of the loss: 0 times an infinity is no number.
            trainer_logprobs = scored.trainer_logprobs if is_trained else scored.trainer_logprobs.detach()
            kl = self.kl(trainer_logprobs, scored.reference_logprobs)
            if algorithm.kl_unbiased:
                kl = unbiased(kl, trainer_logprobs, scored.reference_logprobs, scored.old_logprobs)
            if is_trained:
                per_token = per_token + algorithm.kl_coefficient * kl
        if algorithm.entropy_coefficient:
            per_token = per_token - algorithm.entropy_coefficient * scored.entropies
        # where, not a product with 0: a masked token may hold an infinity
        loss = (self._aggregation(mask, row.sequence_ids, totals) * torch.where(mask, per_token, 0.0)).sum()
        return loss, _sums(loss, scored, policy, weights, kl)

    @torch.no_grad()
    def kl_of_rollouts(self, row: DeviceRow, old_logprobs: Tensor, reference_logprobs: Tensor, size: int) -> Tensor:
        """KL summed over the trained tokens of each rollout, (size,) float64; 0 for those that are not in the row."""
        kl = self.kl(old_logprobs, reference_logprobs)
        sums = sequence_sums(kl.double(), row.mask, row.sequence_ids)
        return sums.new_zeros(size).index_add(0, row.rollouts, sums)

    def _weights(self, scored: "Scored") -> Tensor:
        algorithm, row = self._algorithm, scored.row
        weights = self._correction(scored.old_logprobs, row.sampler_logprobs, row.mask, row.sequence_ids)
        if algorithm.opsm_limit:
            weights = weights * off_policy_kept(
                scored.trainer_logprobs,
                row.sampler_logprobs,
                scored.advantages,
                row.mask,
                row.sequence_ids,
                limit=algorithm.opsm_limit,
            )
        return weights


@dataclass(frozen=True, slots=True)
class Scored:
    """A row with what the loss needs, (N,) float32 each. reference_logprobs: None where no KL is wanted."""

    row: DeviceRow
    trainer_logprobs: Tensor
    entropies: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    reference_logprobs: Tensor | None


def _sums(loss: Tensor, scored: Scored, policy: Any, weights: Tensor, kl: Tensor | None) -> Sums:
    mask = scored.row.mask
    with torch.no_grad():
        mismatch = (scored.old_logprobs - scored.row.sampler_logprobs)[mask].double()
        summed = {
            "loss": loss.detach(),
            "tokens": mask.sum(),
            "entropy": scored.entropies[mask].double().sum(),
            "ratio": policy.ratio[mask].double().sum(),
            "clipped": policy.clipped[mask].sum(),
            "mismatch": mismatch.sum(),
            "mismatch_absolute": mismatch.abs().sum(),
            # KL(sampler || trainer) by k3, from tokens of the sampler
            "mismatch_kl": (mismatch.expm1() - mismatch).sum(),
            "correction": weights[mask].double().sum(),
            "left_out": (weights[mask] == 0).sum(),
        }
        if kl is not None:
            summed["kl"] = kl[mask].double().sum()
        largest = {}
        if mismatch.numel():
            largest = {"mismatch_largest": mismatch.abs().max(), "ratio_largest": policy.ratio[mask].max()}
    return Sums({k: float(v) for k, v in summed.items()}, {k: float(v) for k, v in largest.items()})
