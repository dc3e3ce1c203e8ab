"""Sums and means over the responses of a packed row."""

import torch
from torch import Tensor


def sequence_sums(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Sum of each response's trained tokens, at the response's number; (N,) as the tokens, 0 behind the last response.
    A masked token may hold anything.

    No response is without a token, so there is room for all: to ask how many there are is to wait for the device.
    """
    return torch.zeros_like(values).index_add(0, sequence_ids, torch.where(mask, values, 0.0))


def sequence_means(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Mean over each response's trained tokens, at its number, (N,); 0 for a response without one."""
    lengths = sequence_sums(torch.ones_like(values), mask, sequence_ids)
    return sequence_sums(values, mask, sequence_ids) / lengths.clamp(min=1.0)
