"""Sums and means over the responses of a packed row."""

import torch
from torch import Tensor


def sequence_sums(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Sum of each response's trained tokens, (R,), R the highest id + 1. A masked token may hold anything."""
    size = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    return values.new_zeros(size).index_add(0, sequence_ids, torch.where(mask, values, 0.0))


def sequence_means(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Mean over each response's trained tokens, (R,); 0 for a response without one."""
    lengths = sequence_sums(torch.ones_like(values), mask, sequence_ids)
    return sequence_sums(values, mask, sequence_ids) / lengths.clamp(min=1.0)
