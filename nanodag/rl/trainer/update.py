"""One micro-batch's share of an update's loss, and the numbers that are logged about it.

    loss = sum over tokens of w * (c * policy loss + kl_coefficient * KL - entropy_coefficient * entropy)

w from the aggregation, made with totals over the whole update; c from the off-policy correction (sampler against old),
its veto and off-policy sequence masking. With `kl_in: reward` the KL is taken off the rewards instead. Where answers
are imitated (`rollout.clone`), the policy loss is a token's negative log-likelihood, and c is 1.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanodag.config.kinds.rl import RLStage
from nanodag.rl.losses import Totals, none, not_vetoed, off_policy_kept, reinforce, sequence_sums, unbiased
from nanodag.rl.rollouts.metrics import Sums
from nanodag.rl.rollouts.rollout import Rollout
from nanodag.rl.trainer.policy import DeviceRow

Scores = tuple[DeviceRow, Tensor, Tensor]
"""A row with its advantages and old log-probabilities, (N,) float32 each."""


@dataclass(slots=True)
class DeviceSums:
    """Sums of tensors () of any dtype on one device, added up in float64, as nanodag.rl.rollouts.metrics.Sums of
    numbers. Of a maximum over nothing, -inf, nothing is read. To read is to wait for the device, so a step reads once,
    at its end."""

    summed: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: "DeviceSums") -> None:
        for name, value in other.summed.items():
            self.summed[name] = self.summed[name] + value.double() if name in self.summed else value.double()
        for name, value in other.largest.items():
            here = value.double()
            self.largest[name] = torch.maximum(self.largest[name], here) if name in self.largest else here

    def read(self) -> Sums:
        """The numbers, in one copy from the device."""
        tensors = [*self.summed.values(), *self.largest.values()]
        values = torch.stack([tensor.double() for tensor in tensors]).tolist() if tensors else []
        largest = zip(self.largest, values[len(self.summed) :], strict=True)
        maxima = {name: value for name, value in largest if value != float("-inf")}
        return {"summed": dict(zip(self.summed, values, strict=False)), "largest": maxima}


class PolicyObjective:
    """The loss that a config chose, its entries loaded. kl: the estimator of a token's KL (nanodag.rl.losses)."""

    def __init__(self, config: RLStage) -> None:
        self._algorithm = algorithm = config.algorithm
        self._is_cloned = bool(config.rollout.clone.best)
        self._policy_loss = reinforce if self._is_cloned else algorithm.load(algorithm.policy_loss)
        self._aggregation = algorithm.aggregation.load()
        self.kl = algorithm.kl_kind.load()
        self._correction = none if self._is_cloned else algorithm.load(algorithm.correction)

    def __call__(self, scored: "Scored", totals: Totals) -> tuple[Tensor, DeviceSums]:
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
            # Nor may a masked token's: where it is far from the reference, the gradient of k3 is 0 times an infinity.
            trainer_logprobs = torch.where(mask, trainer_logprobs, scored.reference_logprobs)
            kl = self.kl(trainer_logprobs, scored.reference_logprobs)
            if algorithm.kl_unbiased:
                kl = unbiased(kl, trainer_logprobs, scored.reference_logprobs, scored.old_logprobs)
            if is_trained:
                per_token = per_token + algorithm.kl_coefficient * kl
        if algorithm.entropy_coefficient:
            per_token = per_token - algorithm.entropy_coefficient * scored.entropies
        # where, not a product with 0: a masked token may hold an infinity
        loss = (self._aggregation(mask, row.sequence_ids, totals) * torch.where(mask, per_token, 0.0)).sum()
        return loss, _sums(loss, scored, policy, None if self._is_cloned else weights, kl)

    def _weights(self, scored: "Scored") -> Tensor:
        algorithm, row = self._algorithm, scored.row
        compared = (scored.old_logprobs, row.sampler_logprobs, row.mask, row.sequence_ids)
        weights = self._correction(*compared)
        if algorithm.correction_veto:
            weights = weights * not_vetoed(*compared, veto=algorithm.correction_veto)
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


def kl_of_rollouts(kl: Tensor, row: DeviceRow, size: int) -> Tensor:
    """KL, (N,), summed over the trained tokens of each rollout, (size,) float64; 0 for those not in the row."""
    sums = sequence_sums(kl.double(), row.mask, row.sequence_ids)
    return sums.new_zeros(size).index_add(0, row.rollouts, sums[: len(row.rollouts)])


@torch.no_grad()
def _sums(loss: Tensor, scored: Scored, policy: Any, weights: Tensor | None, kl: Tensor | None) -> DeviceSums:
    """weights: None where nothing is compared with the sampler."""
    # By `where`: to pick out what a mask shows, or to look whether it shows anything, a GPU must be waited for.
    mask = scored.row.mask
    summed = {
        "loss": loss.detach(),
        "tokens": mask.sum(),
        "entropy": sum_where(mask, scored.entropies),
        "ratio": sum_where(mask, policy.ratio),
        "clipped": (policy.clipped & mask).sum(),
    }
    largest = {"ratio_largest": torch.where(mask, policy.ratio, -torch.inf).max()}
    if weights is not None:
        mismatch = torch.where(mask, scored.old_logprobs - scored.row.sampler_logprobs, 0.0).double()
        summed |= {
            "mismatch": mismatch.sum(),
            "mismatch_absolute": mismatch.abs().sum(),
            # KL(sampler || trainer) by k3, from tokens of the sampler
            "mismatch_kl": (mismatch.expm1() - mismatch).sum(),
            "correction": sum_where(mask, weights),
            "left_out": ((weights == 0) & mask).sum(),
        }
        largest["mismatch_largest"] = torch.where(mask, mismatch.abs(), -torch.inf).max()
    if kl is not None:
        summed["kl"] = sum_where(mask, kl)
    return DeviceSums(summed, largest)


def sum_where(mask: Tensor, values: Tensor) -> Tensor:
    """The sum of the values, (N,), where the mask is True: () float64. Elsewhere they may be anything."""
    return torch.where(mask, values.detach(), 0.0).double().sum()


def write_scores(path: Path, parts: Sequence[tuple[Sequence[Rollout], Iterable[Scores]]]) -> None:
    """Write a rank's share of a step beside the rollouts, for readers. parts: the rollouts of each update, and this
    rank's rows of them.

    Rank R writes `step-N.scores-R.jsonl`, a line a rollout: group_id, sample_index, branch, and two numbers for each
    token after the prompt. One is the token's advantage, the other its mismatch: the log-probability by the trainer at
    the start of the step less the sampler's, in nats. Both are null for a token that is not trained.
    """
    lines = [line for rollouts, rows in parts for row in rows for line in _score_lines(rollouts, row)]
    path.write_text("".join(lines), encoding="utf-8")


def _score_lines(rollouts: Sequence[Rollout], scores: Scores) -> Iterable[str]:
    row, advantages, old_logprobs = scores
    mask = row.mask.tolist()
    columns = [
        [round(v, 5) if is_trained and math.isfinite(v) else None for v, is_trained in zip(of, mask, strict=True)]
        for of in (advantages.tolist(), (old_logprobs - row.sampler_logprobs).tolist())
    ]
    sizes = row.sequence_ids.bincount(minlength=len(row.rollouts)).tolist()
    start = 0
    for index, size in zip(row.rollouts.tolist(), sizes, strict=True):
        place, start = slice(start, start + size), start + size
        if any(mask[place]):  # a row that only keeps a rank busy is masked
            rollout = rollouts[index]
            record = {
                "group_id": rollout.group_id,
                "sample_index": rollout.sample_index,
                "branch": rollout.branch,
                "advantages": columns[0][place],
                "differences": columns[1][place],
            }
            yield json.dumps(record, separators=(",", ":")) + "\n"
