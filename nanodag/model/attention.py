"""Attention inside documents: a token sees the tokens of its own document up to itself, wherever documents share a row.

Letters: B rows, T tokens a row, H query heads, G key-value heads (each serves H / G query heads), D head width.

An `Attend` is made once a batch and used by every layer. It lays out on the host where documents lie, so that no device
is waited for. Which way, by what the machine does well; none holds a mask of queries by keys:
- `flash`: CUDA where `flash_takes` it: flash attention over variable lengths, row boundaries being just more of them;
- `own`: CPU, heads that are a multiple of 16 wide: our own code over variable lengths (nanodag.model.cpu_attention);
- `by_length`: elsewhere: documents of about one length side by side, each in a row of its own.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanodag.model.cpu_attention import CpuAttention, can_attend, pieces_of_documents

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query (B, T, H, D), key and value (B, T, G, D) -> (B, T, H, D), dtype of the query."""
Way = Literal["flash", "own", "by_length"]
Flat = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query (B * T, H, D), key and value (B * T, G, D) -> (B * T, H, D)."""


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of an array on a device; on the CPU the array itself. The copy to a GPU goes on while the host does: it is
    made from pinned memory, for from any other CUDA copies before the call returns."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def document_attention(document_ids: np.ndarray) -> Attend:
    """The Attend of a packed batch. document_ids: (B, T) integers, one number a document within a row; padding -1. What
    it needs to know of them is laid out on the query's device when it is first called."""
    made: list[Flat] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not made:
            made.append(WAYS[way_of(query)](document_ids, query.device))
        return made[0](query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)).view(query.shape)

    return attend


def way_of(query: Tensor) -> Way:
    """How documents are attended to. query: (B, T, H, D)."""
    if flash_takes(query.device, query.dtype, query.shape[-1]):
        return "flash"
    return "own" if can_attend(query) else "by_length"


def _flash(document_ids: np.ndarray, device: torch.device) -> Flat:
    lengths = pieces_of_documents(document_ids).pieces[:, 1]
    where = on_device(np.cumsum([0, *lengths], dtype=np.int32), device)
    longest = int(lengths.max())
    bounds = Boundaries(where, where, longest, longest)
    return lambda query, key, value: attend_within(query, key, value, bounds)


def _own(document_ids: np.ndarray, device: torch.device) -> Flat:
    pieces = pieces_of_documents(document_ids)
    return lambda query, key, value: CpuAttention.apply(query, key, value, pieces)


def _by_length(document_ids: np.ndarray, device: torch.device) -> Flat:
    classes, back = length_classes(document_ids)
    laid_out = [on_device(places, device) for places in classes]
    order = on_device(back, device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        wide = (query, *(tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value)))
        found = []
        for places in laid_out:
            rows = [t.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2) for t in wide]
            attended = scaled_dot_product_attention(rows[0], rows[1], rows[2], is_causal=True)
            found.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(found).index_select(0, order)

    return attend


def length_classes(document_ids: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Documents in classes of lengths above one power of two and up to the next: of each class the places of its
    documents' tokens, (S, longest) int64, a document a row, filled up with its first place; and (B * T,) int64, where
    each token lies in all rows of all classes, flattened. At most half of the rows is filled up."""
    pieces = pieces_of_documents(document_ids).pieces
    powers = np.ceil(np.log2(pieces[:, 1])).astype(int)
    classes = []
    back = np.zeros(document_ids.size, np.int64)
    first = 0
    for power in np.unique(powers):
        starts, lengths = pieces[powers == power].T
        counting = np.arange(lengths.max())
        is_real = counting < lengths[:, None]
        places = starts[:, None] + np.where(is_real, counting, 0)
        back[places[is_real]] = first + np.flatnonzero(is_real)
        classes.append(places)
        first += places.size
    return classes, back


WAYS: dict[Way, Callable[[np.ndarray, torch.device], Flat]] = {"flash": _flash, "own": _own, "by_length": _by_length}


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
