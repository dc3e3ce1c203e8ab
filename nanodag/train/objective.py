"""The objective of supervised training: a sum, which the loop divides by the number of labels.

The loop divides the sum over all micro-batches and ranks by the number over all of them. So the way a step is cut into
micro-batches does not change a result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanodag.model.attention import Attend, document_attention, on_device
from nanodag.model.decoder import IGNORED
from nanodag.train.packing import Batch


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A micro-batch on the device: (B, T) each, as in nanodag.train.packing.Batch. attend: inside its documents.
    label_places: (N,) int64, where predictions with loss are in the flattened labels."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    attend: Attend
    label_places: Tensor


def to_device(batch: Batch, device: torch.device) -> DeviceBatch:
    """Move a batch of arrays to a device, with what would have to be read back from there: a GPU that is asked for a
    number is waited for."""
    return DeviceBatch(
        input_ids=on_device(batch.input_ids, device),
        labels=on_device(batch.labels, device),
        position_ids=on_device(batch.position_ids, device),
        attend=document_attention(batch.document_ids),
        label_places=on_device(np.flatnonzero(batch.labels != IGNORED), device),
    )


def next_token_loss(model: Callable[..., Any], batch: DeviceBatch) -> Tensor:
    """Sum of -log p over the labels that are not -100, in nats, with gradient."""
    loss: Tensor = model(
        batch.input_ids, batch.position_ids, targets=batch.labels, attend=batch.attend, places=batch.label_places
    )
    return loss
