"""Objectives of training: objects with `loss(model, batch) -> (sum, count, metrics)`.

The loop divides the sum over all micro-batches and ranks by the count over all of them. So the way a step is cut into
micro-batches does not change a result. A metric is a sum too, divided by the same count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nanodag.model.attention import Attend, document_attention, on_device
from nanodag.model.decoder import IGNORED
from nanodag.train.packing import Batch

Model = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A micro-batch on the device: (B, T) each, as in nanodag.train.packing.Batch. attend: inside its documents.
    num_labels: predictions with loss. label_places: (num_labels,) int64, where they are in the flattened labels."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    attend: Attend
    num_labels: int
    label_places: Tensor


def to_device(batch: Batch, device: torch.device) -> DeviceBatch:
    """Move a batch of arrays to a device, with what would have to be read back from there: a GPU that is asked for a
    number is waited for."""
    return DeviceBatch(
        input_ids=on_device(batch.input_ids, device),
        labels=on_device(batch.labels, device),
        position_ids=on_device(batch.position_ids, device),
        attend=document_attention(batch.document_ids),
        num_labels=batch.num_labels,
        label_places=on_device(np.flatnonzero(batch.labels != IGNORED), device),
    )


class Objective(Protocol):
    """One way to train a model."""

    def count(self, batch: Batch) -> float:
        """This batch's part of the denominator; known before the model runs."""
        ...

    def loss(self, model: Model, batch: DeviceBatch) -> tuple[Tensor, float, dict[str, float]]:
        """The sum to be minimised (with gradient), the count it is divided by, and sums to be logged."""
        ...


class NextToken:
    """Predict the next token: the sum of -log p over the labels that are not -100, in nats."""

    def count(self, batch: Batch) -> float:
        return float(batch.num_labels)

    def loss(self, model: Model, batch: DeviceBatch) -> tuple[Tensor, float, dict[str, float]]:
        loss = model(
            batch.input_ids,
            batch.position_ids,
            targets=batch.labels,
            attend=batch.attend,
            places=batch.label_places,
        )
        return loss, float(batch.num_labels), {}
