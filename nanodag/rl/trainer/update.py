"""One micro-batch's share of an update's loss, and the numbers that are logged about it.

    loss = sum over tokens of w * (c * policy loss + kl_coefficient * KL - entropy_coefficient * entropy)

w from the aggregation, made with totals over the whole update; c from the off-policy correction (sampler against old)
and off-policy sequence masking. With `kl_in: reward` the KL is taken off the rewards instead.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanodag import registry as entries
from nanodag.config.kinds.rl import LOSS_SETTINGS, RLStage
from nanodag.errors import ConfigError
from nanodag.rl.losses.aggregation import Totals
from nanodag.rl.losses.kl import unbiased
from nanodag.rl.losses.opsm import off_policy_kept
from nanodag.rl.losses.sequences import sequence_sums
from nanodag.rl.rollouts.metrics import Sums
from nanodag.rl.trainer.policy import DeviceRow


class PolicyObjective:
    """The loss that a config chose, its entries loaded. kl: the estimator of a token's KL (nanodag.rl.losses.kl)."""

    def __init__(self, config: RLStage) -> None:
        self._config = config
        self._policy_loss = entries.load("policy_loss", config.policy_loss)
        self._options = _options_of(self._policy_loss, config)
        self._aggregation = entries.load("aggregation", config.aggregation)
        self.kl = entries.load("kl", config.kl_kind)
        self._correction = entries.load("correction", config.correction)

    def __call__(self, scored: "Scored", totals: Totals) -> tuple[Tensor, Sums]:
        """The share of the loss, to be summed over micro-batches and ranks, and sums over its trained tokens."""
        config, row, mask = self._config, scored.row, scored.row.mask
        policy = self._policy_loss(
            scored.trainer_logprobs,
            scored.old_logprobs,
            scored.advantages,
            mask,
            row.sequence_ids,
            **self._options,
        )
        weights = self._weights(scored)
        per_token = policy.values * weights
        kl = None
        if scored.reference_logprobs is not None:
            kl = self.kl(scored.trainer_logprobs, scored.reference_logprobs)
            if config.kl_unbiased:
                kl = unbiased(kl, scored.trainer_logprobs, scored.reference_logprobs, scored.old_logprobs)
            if config.kl_in == "loss":
                per_token = per_token + config.kl_coefficient * kl
        if config.entropy_coefficient:
            per_token = per_token - config.entropy_coefficient * scored.entropies
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
        config, row = self._config, scored.row
        weights = self._correction(
            scored.old_logprobs,
            row.sampler_logprobs,
            row.mask,
            row.sequence_ids,
            floor=config.correction_floor,
            cap=config.correction_cap,
        )
        if config.opsm_limit:
            weights = weights * off_policy_kept(
                scored.trainer_logprobs,
                row.sampler_logprobs,
                scored.advantages,
                row.mask,
                row.sequence_ids,
                limit=config.opsm_limit,
            )
        return weights


@dataclass(frozen=True, slots=True)
class Scored:
    """A row with what the loss needs, (N,) float32 each. reference_logprobs: None when there is no KL term."""

    row: DeviceRow
    trainer_logprobs: Tensor
    entropies: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    reference_logprobs: Tensor | None


def _options_of(policy_loss: Callable[..., Any], config: RLStage) -> dict[str, float]:
    """The config's options that the loss's signature names. Raises ConfigError for a value that it would not see."""
    parameters = inspect.signature(policy_loss).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    options = {}
    for name in sorted(LOSS_SETTINGS):
        value = getattr(config, name)
        if takes_all or name in parameters:
            options[name] = value
        elif value != RLStage.model_fields[name].default:
            raise ConfigError(f"policy_loss {config.policy_loss} does not name {name} {value}; leave it out.")
    return options


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
