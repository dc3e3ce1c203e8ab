"""The memory that decoding works in, and the views of it that one shape of decode step needs.

Python-level calls bound a decode step of a small model. So every slice, transpose and expand that it needs is made once
per (rows, length) and kept. Letters as in ``model.py``.
"""

import math
import mmap

import torch
from torch import Tensor

from nanodag.inference.cache_size import SLOT_UNIT
from nanodag.model.architecture import Architecture

ATTENTION_CHUNK = SLOT_UNIT
"""Tokens of the cache that deterministic attention takes at a time; slots are whole multiples of it."""
NORM_COLUMNS = 16  # one is used; 16 keep the rows aligned


class Buffers:
    """Cache, state and scratch for B slots of C tokens; float32, but for the cache, in ``cache_dtype``, and what torch
    attends in, ``attention_dtype``: the cache's, but float32 on a CPU.

    All are zeros, not empty: masked positions are multiplied by zero, which stale NaN would survive. Capacity that is
    never used costs no memory on a CPU.
    """

    def __init__(
        self,
        architecture: Architecture,
        num_slots: int,
        capacity: int,
        vocab_width: int,
        device: torch.device,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        a = architecture

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        groups = num_slots * a.num_kv_heads
        self.num_slots, self.capacity, self.cache_dtype = num_slots, capacity, cache_dtype
        self.attention_dtype = torch.float32 if device.type == "cpu" else cache_dtype
        cache_shape = (groups, capacity, a.head_dim)
        self.keys = [_zeros_when_touched(cache_shape, device, cache_dtype) for _ in range(a.num_layers)]
        self.values = [_zeros_when_touched(cache_shape, device, cache_dtype) for _ in range(a.num_layers)]
        self.mask = zeros(groups, capacity, dtype=self.attention_dtype).fill_(-torch.inf)
        self.mask[:, 0] = 0.0
        # One column more than the hidden state: |(x, sqrt(H eps))| is what an RMS norm divides by, in one call.
        self.hidden_and_epsilon = zeros(num_slots, a.hidden_size + NORM_COLUMNS)
        self.hidden_and_epsilon[:, a.hidden_size] = (a.hidden_size * a.norm_eps) ** 0.5
        self.hidden = self.hidden_and_epsilon[:, : a.hidden_size]
        self.prompt_hidden = zeros(num_slots, a.hidden_size)
        self.tokens = zeros(num_slots, dtype=torch.int64)
        self.positions = zeros(num_slots, dtype=torch.int64)
        slots = torch.arange(num_slots, device=device)[:, None]
        self.cache_base = (slots * a.num_kv_heads + torch.arange(a.num_kv_heads, device=device)) * capacity
        self.cache_index = zeros(groups, dtype=torch.int64)
        self.rotation_rows = zeros(num_slots, a.head_dim // 2, dtype=torch.complex64)
        # 1 for the value's row: rotating the whole projection at once needs one call instead of three.
        self.rotation = zeros(groups, a.heads_per_kv + 2, a.head_dim // 2, dtype=torch.complex64).fill_(1.0)
        self.qk_scale = zeros(groups, a.heads_per_kv + 2, 1).fill_(1.0)
        self.epsilon = zeros(1).fill_(a.norm_eps)
        self.normed = zeros(num_slots, a.hidden_size)
        self.scale = zeros(num_slots, 1)
        self.qkv = zeros(num_slots, a.qkv_width)
        num_scores = groups * a.heads_per_kv * capacity if self.attention_dtype == torch.float32 else 0
        self.scores = _zeros_when_touched((num_scores,), device)
        self.weights = _zeros_when_touched((num_scores,), device)
        self.attended = zeros(groups, a.heads_per_kv, a.head_dim)
        self.gate_up = zeros(num_slots, 2 * a.intermediate_size)
        self.activated = zeros(num_slots, a.intermediate_size)
        self.logits = zeros(num_slots, vocab_width)


def _zeros_when_touched(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros, which on a CPU take no memory until they are used: torch.zeros writes all of them at once."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, dtype.itemsize * math.prod(shape)), dtype=dtype).view(shape)


class DecodeViews:
    """Views of ``Buffers`` for R rows that read L tokens of the cache."""

    def __init__(self, b: Buffers, a: Architecture, rows: int, length: int, *, in_chunks: bool) -> None:
        groups, group = rows * a.num_kv_heads, a.heads_per_kv
        self.tokens, self.positions = b.tokens[:rows], b.positions[:rows]
        self.positions_column = self.positions[:, None]
        self.cache_base = b.cache_base[:rows]
        self.cache_index = b.cache_index[:groups]
        self.cache_index_rows = self.cache_index.view(rows, a.num_kv_heads)
        self.mask_flat = b.mask.view(-1)
        self.x_and_epsilon = b.hidden_and_epsilon[:rows]
        self.x, self.normed, self.scale = b.hidden[:rows], b.normed[:rows], b.scale[:rows]
        self.qkv = b.qkv[:rows]
        self.heads = self.qkv.view(groups, group + 2, a.head_dim)
        self.query_and_key = self.heads[:, : group + 1]
        self.query, self.key, self.value = self.heads[:, :group], self.heads[:, group], self.heads[:, group + 1]
        self.head_scale = b.qk_scale[:groups]
        self.qk_scale = self.head_scale[:, : group + 1]
        self.pairs = torch.view_as_complex(self.heads.view(groups, group + 2, a.head_dim // 2, 2))
        self.rotation = b.rotation[:groups]
        self.rotation_rows = b.rotation_rows[:rows]
        self.rotation_rows_expanded = self.rotation_rows[:, None, None]
        self.rotation_heads = self.rotation.view(rows, a.num_kv_heads, group + 2, -1)[:, :, : group + 1]
        self.attended = b.attended[:groups]
        self.attended_rows = self.attended.view(rows, a.num_heads * a.head_dim)
        self.gate_up, self.activated = b.gate_up[:rows], b.activated[:rows]
        self.gate, self.up = self.gate_up[:, : a.intermediate_size], self.gate_up[:, a.intermediate_size :]
        self.logits = b.logits[:rows]
        self.logits_padding = self.logits[:, a.vocab_size :] if a.vocab_size < b.logits.shape[1] else None
        self.key_rows = [cache.view(-1, a.head_dim) for cache in b.keys]
        self.value_rows = [cache.view(-1, a.head_dim) for cache in b.values]
        if in_chunks:
            self._chunks(b, groups, group, length)
        else:
            self.keys_transposed = [cache[:groups, :length].transpose(1, 2) for cache in b.keys]
            self.keys = [cache[:groups, :length] for cache in b.keys]
            self.values = [cache[:groups, :length] for cache in b.values]
            self.mask = b.mask[:groups, None, :length].expand(groups, group, length)
            if b.attention_dtype != torch.float32:
                return
            self.scores = b.scores[: groups * group * length].view(groups, group, length)
            self.weights = b.weights[: groups * group * length].view(groups, group, length)

    def _chunks(self, b: Buffers, groups: int, group: int, length: int) -> None:
        size = ATTENTION_CHUNK
        chunks = [slice(start, start + size) for start in range(0, length, size)]
        self.key_chunks = [[cache[:groups, c].transpose(1, 2) for c in chunks] for cache in b.keys]
        self.value_chunks = [[cache[:groups, c] for c in chunks] for cache in b.values]
        self.mask_chunks = [b.mask[:groups, None, c].expand(groups, group, size) for c in chunks]
        count = len(chunks)
        self.chunked_scores = b.scores[: count * groups * group * size].view(count, groups, group, size)
        self.score_chunks = list(self.chunked_scores.unbind(0))
