"""Attention inside documents: a token sees the tokens of its own document up to itself, wherever documents share a row.

Letters: B rows, T tokens a row, H query heads, G key-value heads (each serves H / G query heads), D head width.

An `Attend` is made once a batch and used by every layer. Which one, by what the machine does well:
- CUDA where `flash_takes` it: flash attention over variable lengths, row boundaries being just more boundaries;
- CPU: our own code over variable lengths (nanodag.model.cpu_attention), for heads that are a multiple of 16 wide;
- elsewhere: scaled_dot_product_attention under a mask.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanodag.model.cpu_attention import CpuAttention, can_attend, pieces_of_documents

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query (B, T, H, D), key and value (B, T, G, D) -> (B, T, H, D), dtype of the query."""


def document_attention(document_ids: Tensor, dtype: torch.dtype, head_dim: int) -> Attend:
    """The Attend of a packed batch. document_ids: (B, T) integers, one number a document within a row; padding -1."""
    if flash_takes(document_ids.device, dtype, head_dim):
        return _variable_length(document_ids)
    if document_ids.device.type == "cpu":
        return _on_cpu(document_ids)
    return _masked(visible(document_ids))


def visible(document_ids: Tensor) -> Tensor:
    """Which key each query sees: (B, T, T) bool. Padding sees padding, so that no row of a softmax is empty."""
    length = document_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return (document_ids[:, :, None] == document_ids[:, None, :]) & causal


def _masked(mask: Tensor) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask[:, None],
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.transpose(1, 2)

    return attend


def _on_cpu(document_ids: Tensor) -> Attend:
    pieces = pieces_of_documents(document_ids)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not can_attend(query):
            return _masked(visible(document_ids))(query, key, value)
        tokens = (tensor.flatten(0, 1) for tensor in (query, key, value))
        return CpuAttention.apply(*tokens, pieces).view(query.shape)

    return attend


def flash_takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `attend_within` can be had."""
    return device.type == "cuda" and is_for_flash(torch.cuda.get_device_capability(device), dtype, head_dim)


def is_for_flash(capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    """Whether PyTorch's flash attention has a kernel: from Ampere on, in 16 bits, for heads of 8, 16, ... 256."""
    return capability >= (8, 0) and dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Of S sequences that lie one after the other, none empty. queries, keys: (S + 1,) int32, where each begins, and
    the end. longest_query, longest_key: tokens."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int


def attend_within(query: Tensor, key: Tensor, value: Tensor, bounds: Boundaries) -> Tensor:
    """Causal attention in each sequence: query (T, H, D), key and value (U, G, D) -> (T, H, D).

    Where a sequence has more keys than queries, its last query sees all of them, the one before all but the last.
    """
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer key-value heads without being told, and knows no such option.
    knows = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if knows else {}
    out = varlen_attn(
        query,
        key,
        value,
        bounds.queries,
        bounds.keys,
        bounds.longest_query,
        bounds.longest_key,
        window_size=(-1, 0),
        **options,
    )
    assert isinstance(out, Tensor)  # of the two that varlen_attn may return, the one without statistics
    return out


def _variable_length(document_ids: Tensor) -> Attend:
    rows, length = document_ids.shape
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begins = starts.flatten().nonzero().squeeze(1)
    where = torch.cat([begins, begins.new_tensor([starts.numel()])]).to(torch.int32)
    longest = int(where.diff().max())
    bounds = Boundaries(where, where, longest, longest)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_within(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), bounds).unflatten(
            0, (rows, length)
        )

    return attend
