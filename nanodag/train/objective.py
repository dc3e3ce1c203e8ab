"""Objectives of supervised training: a sum, which the loop divides by the number of what it is over.

The loop divides the sum over all micro-batches and ranks by the number over all of them. So the way a step is cut into
micro-batches does not change a result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nanodag.model.attention import Attend, Packed, on_device, sequences_of_documents
from nanodag.model.decoder import IGNORED
from nanodag.train.packing import Batch
from nanodag.train.sequence_parallel import ALONE, SequenceGroup

if TYPE_CHECKING:
    from nanodag.train.setup import PreparedStage


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A micro-batch on the device: (B, T) each, as in nanodag.train.packing.Batch. attend: inside its documents.
    label_places: (N,) int64, where predictions with loss are in the flattened labels. Where ranks share it, this one's
    part of all rows one after the other, (1, B * T / ranks)."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    attend: Attend
    label_places: Tensor


def to_device(batch: Batch, device: torch.device, group: SequenceGroup = ALONE) -> DeviceBatch:
    """Move a batch of arrays to a device, with what would have to be read back from there: a GPU that is asked for a
    number is waited for. group: of the ranks that share it."""
    sequences = sequences_of_documents(batch.document_ids)
    if batch.continued is not None:
        starts, length = sequences[:, 0], batch.document_ids.shape[1]
        behind = batch.continued.ravel()[starts]
        first = np.searchsorted(starts, starts // length * length)  # sequence at the begin of its row
        sequences[:, 2] = np.where(behind < 0, -1, first + behind)
    ids, labels, positions = (group.part(array) for array in (batch.input_ids, batch.labels, batch.position_ids))
    return DeviceBatch(
        input_ids=on_device(ids, device),
        labels=on_device(labels, device),
        position_ids=on_device(positions, device),
        attend=group.attention(Packed(sequences), batch.labels.size),
        label_places=on_device(np.flatnonzero(labels != IGNORED), device),
    )


def next_token_loss(model: Callable[..., Any], batch: DeviceBatch) -> Tensor:
    """Sum of -log p over the labels that are not -100, in nats, with gradient."""
    loss: Tensor = model(
        batch.input_ids, batch.position_ids, targets=batch.labels, attend=batch.attend, places=batch.label_places
    )
    return loss


OVER = "_over"
"""Ending of the name of a sum that divides another one, where that is not over what the loss is."""


def means_of(sums: Mapping[str, float], count: float) -> dict[str, float]:
    """Means by name of the sums that an objective reports: over count, or over the sum that is called so with OVER."""
    return {n: v / max(sums.get(n + OVER, count), 1.0) for n, v in sums.items() if not n.endswith(OVER)}


class Objective(Protocol):
    """Goal of one stage's training.

    begin: called once, with the weights that the stage begins with, by every rank; may score its data with them.
    count: what the loss of a batch is a sum over, its labels by default. loss: that sum with its gradient, and sums for
    `means_of`.
    """

    def begin(self, stage: "PreparedStage") -> None:
        """By default an objective needs nothing."""

    def count(self, batch: Batch) -> int:
        return batch.num_labels

    def loss(self, engine: Any, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]: ...


class NextToken(Objective):
    """-log p of each label, in nats."""

    group = ALONE

    def begin(self, stage: "PreparedStage") -> None:
        self.group = stage.group

    def loss(self, engine: Any, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return next_token_loss(engine, to_device(batch, engine.device, self.group)), {}
