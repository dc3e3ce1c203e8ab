"""Calls `attention.c`: attention of packed tokens on CPU cores, forward and backward.

Measured beside PyTorch's fused kernel under a mask, forward and backward of 16 rows of 256 tokens, two documents a row,
6 heads of 32, one thread: 15 ms against 42 with AVX2, 11 against 39 with AVX-512, 9 against 40 there in bfloat16.

Letters: N tokens, Q of which ask, H query heads, K key-value heads, D head width.
"""

import ctypes
from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanodag.model.c_library import c_library
from nanodag.model.core_threads import on_threads

SOURCE = Path(__file__).with_name("attention.c")
HEAD_UNIT = 16  # a head's width must be a multiple of it
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Which tokens attend to which: to those of their piece up to themselves, and to all of the pieces that it goes on
    from. All tokens lie in a piece.

    groups: (G + 1,) int64, the first piece of each group; at last the number of pieces. pieces: (P, 2) int64, first
    token and number of tokens; a group's in the order of a walk down its tree. before: (P,) int64, the tokens of the
    pieces that each goes on from. queries: (P, 2) int64, of each piece the first row of its queries and their number:
    all its tokens ask, or the last ones only.
    """

    groups: np.ndarray
    pieces: np.ndarray
    before: np.ndarray
    queries: np.ndarray

    @property
    def longest(self) -> int:
        """Keys that a token can see."""
        return int((self.before + self.pieces[:, 1]).max(initial=0))

    @property
    def is_flat(self) -> bool:
        """Whether all pieces of a group go on from its first, or from none: what a backward pass takes."""
        first = np.repeat(self.pieces[self.groups[:-1], 1], np.diff(self.groups))
        return bool(((self.before == 0) | (self.before == first)).all())


def pieces_of_documents(document_ids: np.ndarray) -> Pieces:
    """Each document of the rows (B, T) is a group of one piece; padding too."""
    begins = np.ones(document_ids.shape, dtype=bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=document_ids.size)
    pieces = np.ascontiguousarray(np.stack([starts, lengths], axis=1))
    return Pieces(np.arange(len(starts) + 1), pieces, np.zeros(len(starts), np.int64), pieces)


def can_attend(query: Tensor) -> bool:
    """Whether `CpuAttention` takes such tensors."""
    return query.device.type == "cpu" and query.dtype in DTYPES and query.shape[-1] % HEAD_UNIT == 0


class CpuAttention(torch.autograd.Function):
    """query (Q, H, D), key and value (N, K, D), pieces -> (Q, H, D)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces) -> Tensor:
        assert query.dtype == key.dtype == value.dtype, "C reads all of them as one type"
        query, key, value = (_dense_heads(tensor) for tensor in (query, key, value))
        output = torch.empty(query.shape, dtype=query.dtype)
        logsumexp = torch.empty(query.shape[:2])
        _run(pieces, logsumexp, backward=False, query=query, key=key, value=value, output=output)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.pieces = pieces
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        assert ctx.pieces.is_flat, "pieces that go on from others than their group's first have no gradient"
        gradients = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in (query, key, value)]
        _run(
            ctx.pieces,
            logsumexp,
            backward=True,
            query=query,
            key=key,
            value=value,
            output=output,
            d_output=_dense_heads(d_output),
            **dict(zip(("d_query", "d_key", "d_value"), gradients, strict=True)),
        )
        return *gradients, None


class _Tokens(Structure):
    _fields_ = [("at", c_void_p), ("stride", c_int64)]


class _Attention(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_groups", "num_heads", "num_kv_heads", "head_dim", "is_bf16", "longest")),
        *((name, c_void_p) for name in ("groups", "pieces", "before", "queries", "logsumexp")),
        *((name, _Tokens) for name in ("query", "key", "value", "output", "d_output", "d_query", "d_key", "d_value")),
    ]


def _dense_heads(tensor: Tensor) -> Tensor:
    """The tensor itself where a token's heads lie without gaps."""
    is_dense = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    return tensor if is_dense else tensor.contiguous()


def _run(pieces: Pieces, logsumexp: Tensor, *, backward: bool, **tensors: Tensor) -> None:
    query, key = tensors["query"], tensors["key"]
    arguments = _Attention(
        num_groups=len(pieces.groups) - 1,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[2],
        is_bf16=query.dtype == torch.bfloat16,
        longest=pieces.longest,
        groups=pieces.groups.ctypes.data,
        pieces=pieces.pieces.ctypes.data,
        before=pieces.before.ctypes.data,
        queries=pieces.queries.ctypes.data,
        logsumexp=logsumexp.data_ptr(),
        **{name: _Tokens(tensor.data_ptr(), tensor.stride(0)) for name, tensor in tensors.items()},
    )
    library, reference = _library(), ctypes.byref(arguments)
    shared = c_int64(0)

    def work(thread: int, num_threads: int) -> None:
        scratch = torch.empty(library.scratch_size(reference))
        library.attention(reference, backward, ctypes.byref(shared), scratch.data_ptr())

    on_threads(work)


@cache
def _library() -> ctypes.CDLL:
    library = c_library(SOURCE, "the attention of training on a CPU")
    library.scratch_size.argtypes, library.scratch_size.restype = [c_void_p], c_int64
    library.attention.argtypes, library.attention.restype = [c_void_p, c_int64, c_void_p, c_void_p], None
    return library
