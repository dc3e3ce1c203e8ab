"""Preferences: losses of pairs of answers, and the objective that trains a policy on them.

P is the number of pairs. Shared arguments of the losses, chosen answers in column 0 and rejected ones in column 1:

    logprobs             (P, 2) float32, of each answer: the sum over its trained tokens; carries the gradient
    reference_logprobs   (P, 2) float32, the same of the weights that the stage begins with
    lengths              (P, 2) float32, trained tokens

A loss is fn(logprobs, reference_logprobs, lengths, **options) -> (P,), with gradient to the first. One that does not
need the reference gets zeros. One that judges each answer alone may get pairs with one answer, whose other one has
length 0 and log-probability 0; its reference is raised by `reference_points`, and a step's mean is over answers.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from nanodag.model.attention import on_device
from nanodag.registry import entry
from nanodag.train.objective import OVER, Objective, to_device
from nanodag.train.packing import Batch
from nanodag.worker.job import leave_stopped, stop_requested

if TYPE_CHECKING:
    from nanodag.train.setup import PreparedStage

log = logging.getLogger(__name__)

SURE = (55, 65, 75, 85, 95)
"""Percent: how sure a reward model is of a pair, sigmoid of the size of the lead."""


def _lead(values: Tensor) -> Tensor:
    """(P, 2) -> (P,): by how much the chosen answer's value is above the rejected one's."""
    return values[:, 0] - values[:, 1]


@entry("preference_loss", "dpo", needs_reference=True)
def dpo(
    logprobs: Tensor, reference_logprobs: Tensor, lengths: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Tensor:
    """Logistic loss of the lead over the reference. label_smoothing: share of pairs that are taken for swapped.

    Source: DPO, arXiv:2305.18290; conservative DPO, Mitchell 2023.
    """
    lead = beta * _lead(logprobs - reference_logprobs)
    return -(1 - label_smoothing) * logsigmoid(lead) - label_smoothing * logsigmoid(-lead)


@entry("preference_loss", "dpo_norm", needs_reference=True)
def dpo_norm(logprobs: Tensor, reference_logprobs: Tensor, lengths: Tensor, *, beta: float = 2.0) -> Tensor:
    """DPO with log-probabilities a token, so that long answers count as short ones.

    Source: Tulu 3, arXiv:2411.15124.
    """
    return -logsigmoid(beta * _lead((logprobs - reference_logprobs) / lengths))


@entry("preference_loss", "robust", needs_reference=True)
def robust(
    logprobs: Tensor, reference_logprobs: Tensor, lengths: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.1
) -> Tensor:
    """DPO that is unbiased where a share label_smoothing (below 0.5) of the pairs is swapped.

    Source: robust DPO, arXiv:2403.00409.
    """
    lead = beta * _lead(logprobs - reference_logprobs)
    kept, swapped = (1 - label_smoothing) * logsigmoid(lead), label_smoothing * logsigmoid(-lead)
    return (swapped - kept) / (1 - 2 * label_smoothing)


@entry("preference_loss", "ipo", needs_reference=True)
def ipo(logprobs: Tensor, reference_logprobs: Tensor, lengths: Tensor, *, beta: float = 0.1) -> Tensor:
    """Squared distance of the lead a token from 1 / (2 beta), at which it stops.

    Source: IPO, arXiv:2310.12036, equation 17; a token as its authors do it.
    """
    return (_lead((logprobs - reference_logprobs) / lengths) - 1 / (2 * beta)).square()


@entry("preference_loss", "hinge", needs_reference=True)
def hinge(logprobs: Tensor, reference_logprobs: Tensor, lengths: Tensor, *, beta: float = 0.1) -> Tensor:
    """How far the lead is below 1 / beta, times beta.

    Source: SLiC-HF, arXiv:2305.10425; RSO, arXiv:2309.06657.
    """
    return (1 - beta * _lead(logprobs - reference_logprobs)).relu()


@entry("preference_loss", "simpo")
def simpo(
    logprobs: Tensor, reference_logprobs: Tensor, lengths: Tensor, *, beta: float = 2.0, gamma: float = 1.0
) -> Tensor:
    """Logistic loss of the lead a token, with a margin gamma, without a reference.

    Source: SimPO, arXiv:2405.14734.
    """
    return -logsigmoid(beta * _lead(logprobs / lengths) - gamma)


@entry("preference_loss", "orpo")
def orpo(logprobs: Tensor, reference_logprobs: Tensor, lengths: Tensor, *, beta: float = 0.1) -> Tensor:
    """-log p a token of the chosen answer, and beta times the logistic loss of the log odds ratio, without a reference.

    Source: ORPO, arXiv:2403.07691.
    """
    means = logprobs / lengths
    odds = means - torch.log1p(-means.exp().clamp(max=1 - 1e-6))
    return -means[:, 0] - beta * logsigmoid(_lead(odds))


@entry("preference_loss", "kto", needs_reference=True, judges_alone=True)
def kto(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    lengths: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Sigmoid of how far each answer by itself, good or bad, is on the wrong side of the reference point.

    Source: KTO, arXiv:2402.01306; its reference point as in `reference_points`.
    """
    gains = logprobs - reference_logprobs
    weights = (lengths > 0) * gains.new_tensor([desirable_weight, undesirable_weight])
    return (weights * torch.sigmoid(gains * gains.new_tensor([-beta, beta]))).sum(1)


def reference_points(engine: Any, gains: Tensor, lengths: Tensor) -> Tensor:
    """KTO's reference point z0 for chosen answers and for rejected ones, (2,), without gradient.

    A chosen answer is compared with the mean gain of the rejected ones, and these with that of the chosen ones. A mean
    below 0, or of no answer, is 0. Means are over the micro-batches that all ranks compute at once, so ranks agree;
    another micro_batch_tokens gives other points. This is a biased estimate, without a further forward pass. The paper,
    and TRL, estimate one point for both from answers to other prompts.

    Source: VanillaKTOLoss of OpenRLHF, which names HALOs at ca9b7e3 (trainers.py).
    """
    sums = engine.summed(*gains.sum(0).tolist(), *(lengths > 0).sum(0).tolist())
    return gains.new_tensor([sums[1] / max(sums[3], 1), sums[0] / max(sums[2], 1)]).clamp(min=0)


def answer_logprobs(engine: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sums of log-probabilities and numbers of trained tokens of each pair's answers, (P, 2) float32 both; 0 of one
    that is absent."""
    moved = to_device(batch, engine.device)
    logprobs, _ = engine(
        moved.input_ids, moved.position_ids, targets=moved.labels, want="logprobs", attend=moved.attend
    )
    row, place = np.nonzero(batch.labels != -100)
    documents = row * batch.labels.shape[1] + batch.document_ids[row, place]
    # Of each label the number of the answer that it is in, as in the batch's `answers`.
    numbers = np.array(batch.answers, dtype=np.int64)[np.unique(documents, return_inverse=True)[1]]
    answers = on_device(numbers, engine.device)
    empty = logprobs.new_zeros(2 * len(batch.keys))
    sums, lengths = empty.index_add(0, answers, logprobs), empty.index_add(0, answers, torch.ones_like(logprobs))
    return sums.view(-1, 2), lengths.view(-1, 2)


def _reported(values: Tensor, name: str) -> dict[str, Tensor]:
    """Sums over pairs of (P, 2) values: where the chosen answer leads, by how much, and the value of either."""
    lead = _lead(values)
    sums = {"accuracy": (lead > 0).float(), f"chosen_{name}": values[:, 0], f"rejected_{name}": values[:, 1]}
    return {what: numbers.sum() for what, numbers in (sums | {"lead": lead}).items()}


def _calibration(lead: Tensor) -> dict[str, Tensor]:
    """Sums over pairs, by how sure the scores are: how many are as sure, in steps of 10 % about each of SURE, and how
    many of these are told apart. Source: reliability diagrams, Guo et al., arXiv:1706.04599."""
    place = (10 * torch.sigmoid(lead.abs()) - 5).long().clamp(max=len(SURE) - 1)
    sums: dict[str, Tensor] = {}
    for number, percent in enumerate(SURE):
        there = place == number
        right, count = ((lead > 0) & there).sum(), there.sum()
        sums |= {f"right_{percent}": right, f"right_{percent}{OVER}": count, f"sure_{percent}": count}
    return sums


def _reported_alone(gains: Tensor, points: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Sums over answers, each on the good side where it is above its point, or below as one to be avoided."""
    is_given = lengths > 0
    lead = (gains - points) * gains.new_tensor([1.0, -1.0]) * is_given
    sums = {"accuracy": (lead > 0).float().sum(), "lead": lead.sum()}
    for column, name in enumerate(("chosen_gain", "rejected_gain")):
        sums |= {name: gains[:, column].sum(), f"{name}{OVER}": is_given[:, column].sum()}
    return sums


class Preference(Objective):
    """The stage's preference loss, summed over pairs, or over answers where it judges these alone."""

    def begin(self, stage: "PreparedStage") -> None:
        """Score all pairs by the weights that the stage begins with, once for all stages that begin so."""
        from nanodag.train.validation import uncompiled

        config: Any = stage.config
        self._loss, self._sft_weight = config.loss.load(), config.sft_weight
        self._judges_alone = config.loss.judges_alone
        self._reference: Mapping[int, tuple[float, float]] | None = None
        if config.loss.needs_reference:
            with uncompiled(stage.model, active=stage.engine.device.type == "cpu"):
                self._reference = stage.data.reference()

    def count(self, batch: Batch) -> int:
        return len(batch.answers if self._judges_alone else batch.keys)

    def loss(self, engine: Any, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Reported: accuracy, the share of pairs whose chosen answer gained more than the rejected one; the gain of
        either, nats over the reference; the lead between them. Of answers alone, the reference point is the other."""
        logprobs, lengths = answer_logprobs(engine, batch)
        reference = torch.zeros_like(logprobs)
        if self._reference is not None:
            known = np.array([self._reference[key] for key in batch.keys], np.float32)
            reference = on_device(known.reshape(-1, 2), engine.device)
        gains = (logprobs - reference).detach()
        points = reference_points(engine, gains, lengths) if self._judges_alone else gains.new_zeros(2)
        loss: Tensor = self._loss(logprobs, reference + points, lengths).sum()
        if self._sft_weight:
            loss = loss - self._sft_weight * (logprobs / lengths.clamp(min=1))[:, 0].sum()
        return loss, _reported_alone(gains, points, lengths) if self._judges_alone else _reported(gains, "gain")


class PairwiseReward(Objective):
    """-log sigmoid(chosen - rejected - margin), the Bradley-Terry model, and the square of the scores' sum, which keeps
    them around 0; summed over pairs. Source: Llama 2, arXiv:2307.09288 (margin); arXiv:2312.09244 (centring)."""

    def begin(self, stage: "PreparedStage") -> None:
        config: Any = stage.config
        self._centring, self._margin_weight = config.centring, config.margin_weight

    def count(self, batch: Batch) -> int:
        return len(batch.keys)

    def loss(self, engine: Any, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Reported: accuracy, the share of pairs whose chosen answer scores higher; the scores of either; the lead;
        and calibration, in validation alone."""
        moved = to_device(batch, engine.device)
        scores = engine(moved.input_ids, moved.position_ids, attend=moved.attend, places=moved.label_places)
        pairs = scores.view(-1, 2)
        margins = self._margin_weight * on_device(np.array(batch.judged, np.float32), engine.device)
        loss: Tensor = -logsigmoid(_lead(pairs) - margins).sum() + self._centring * pairs.sum(1).square().sum()
        reported = _reported(pairs.detach(), "score")
        return loss, reported if torch.is_grad_enabled() else reported | _calibration(_lead(pairs))


class StepReward(Objective):
    """Binary cross entropy of how right each step of an answer is, at its last token; summed over steps.

    Source: Let's Verify Step by Step, arXiv:2305.20050.
    """

    def loss(self, engine: Any, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Reported: accuracy, the share of steps told right or wrong as labelled; the same of wrong steps alone."""
        moved = to_device(batch, engine.device)
        scores = engine(moved.input_ids, moved.position_ids, attend=moved.attend, places=moved.label_places)
        labels = on_device(np.array(batch.judged, np.float32), engine.device)
        told, is_wrong = (scores.detach() > 0) == (labels > 0.5), labels <= 0.5
        sums = {"accuracy": told, "accuracy_of_wrong": told & is_wrong, f"accuracy_of_wrong{OVER}": is_wrong}
        loss: Tensor = binary_cross_entropy_with_logits(scores, labels, reduction="sum")
        return loss, {name: flags.float().sum() for name, flags in sums.items()}


@torch.no_grad()
def scored(engine: Any, batches: Iterator[Batch], empty: Batch) -> dict[int, tuple[float, float]]:
    """Log-probabilities of the answers of all pairs, by their keys, the same on every rank; all must call it. batches:
    this rank's. empty: one of a rank that has no more, for all go through the model together."""
    table: dict[int, tuple[float, float]] = {}
    while True:
        batch = next(batches, None)
        if not engine.highest(float(batch is not None)):
            break
        if engine.highest(stop_requested()):
            log.info("Stopped on request, while all pairs were scored.")
            leave_stopped()
        sums, _ = answer_logprobs(engine, batch or empty)
        if batch is not None:
            table |= dict(zip(batch.keys, map(tuple, sums.tolist()), strict=True))
    return {key: value for part in engine.gathered(table) for key, value in part.items()}
