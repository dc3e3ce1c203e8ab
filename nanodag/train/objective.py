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

from nanodag.train.packing import Batch

Model = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A micro-batch on the device: (B, T) each, as in nanodag.train.packing.Batch. num_labels: predictions with
    loss."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_ids: Tensor
    num_labels: int


def to_device(batch: Batch, device: torch.device) -> DeviceBatch:
    """Move a batch of arrays to a device."""

    def moved(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return DeviceBatch(
        input_ids=moved(batch.input_ids),
        labels=moved(batch.labels),
        position_ids=moved(batch.position_ids),
        document_ids=moved(batch.document_ids),
        num_labels=batch.num_labels,
    )


class Objective(Protocol):
    """One way to train a model."""

    def count(self, batch: Batch) -> float:
        """What this batch adds to the denominator; known before the model runs."""
        ...

    def loss(self, model: Model, batch: DeviceBatch) -> tuple[Tensor, float, dict[str, float]]:
        """The sum to be minimised (with gradient), the count it is divided by, and sums to be logged."""
        ...


class NextToken:
    """Predict the next token: the sum of -log p over the labels that are not -100, in nats."""

    def count(self, batch: Batch) -> float:
        return float(batch.num_labels)

    def loss(self, model: Model, batch: DeviceBatch) -> tuple[Tensor, float, dict[str, float]]:
        loss = model(batch.input_ids, batch.position_ids, batch.document_ids, batch.labels)
        return loss, float(batch.num_labels), {}
