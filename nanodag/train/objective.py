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


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of an array on a device; on the CPU the array itself. The copy to a GPU goes on while the host does: it is
    made from pinned memory, for from any other CUDA copies before the call returns."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_device(batch: Batch, device: torch.device) -> DeviceBatch:
    """Move a batch of arrays to a device."""
    return DeviceBatch(
        input_ids=on_device(batch.input_ids, device),
        labels=on_device(batch.labels, device),
        position_ids=on_device(batch.position_ids, device),
        document_ids=on_device(batch.document_ids, device),
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
