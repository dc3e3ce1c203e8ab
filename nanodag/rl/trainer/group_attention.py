"""Attention for a row in which several responses share one prompt (nanodag.rl.trainer.rows).

Every prompt attends causally to itself; every response to its prompt and causally to itself. Linear layers run over the
packed row without padding. Which way, by what the device does well; none holds a mask of queries by keys but the first:
- `kept`: a CPU, where the probabilities are few enough to be kept (nanodag.rl.trainer.kept_attention);
- `split`: a CPU otherwise: a response's prompt and itself apart, and put together (nanodag.rl.trainer.split_attention);
- `flash`: CUDA where flash attention takes it: prompts and responses are sequences of variable length, without padding,
  and the keys of a response are its prompt's and its own;
- `causal`: elsewhere: each response behind its prompt, as a row of its own.

Letters beyond those of packing: P the longest prompt, L the longest response, H query heads, K key-value heads, D head
width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from nanodag.model.attention import Attend, Boundaries, attend_within, flash_takes
from nanodag.rl.trainer.kept_attention import KeptAttention
from nanodag.rl.trainer.rows import MicroBatch
from nanodag.rl.trainer.split_attention import SplitAttention
from nanodag.train.objective import on_device

MAX_KEPT_PROBABILITIES = 64 << 20  # a layer; 128 MiB in bfloat16

Way = Literal["kept", "split", "flash", "causal"]
Flat = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query (T, H, D), key and value (T, K, D) -> (T, H, D)."""


def group_attention(row: MicroBatch) -> Attend:
    """The Attend of one row: query (1, T, H, D), key and value (1, T, K, D) -> (1, T, H, D). What it needs to know of
    the row is laid out on the query's device when it is first called."""
    made: list[Flat] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not made:
            way = way_of(row, query.device, query.dtype, query.shape[2], query.shape[3])
            made.append(WAYS[way](row, query.device))
        return made[0](query[0], key[0], value[0])[None]

    return attend


def way_of(row: MicroBatch, device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> Way:
    """How a row is attended to on a device."""
    if device.type != "cpu":
        return "flash" if flash_takes(device, dtype, head_dim) else "causal"
    prompt, response = (max(int(lengths.max()), 1) for lengths in (row.prompts[:, 1], row.responses[:, 1]))
    num_probabilities = len(row.responses) * response * (prompt + response) * num_heads
    return "kept" if num_probabilities <= MAX_KEPT_PROBABILITIES else "split"


@dataclass(frozen=True)
class GroupLayout:
    """Where each token of a row lies in padded blocks, (G, P) and (R, L); made once a micro-batch, used by every layer.

    prompt_places: (G, P) int64 and response_places: (R, L) int64, places in the row, padding points at place 0.
    prompt_real and response_real: the same shapes, bool, False for padding. prompt_of: (R,) int64. places_back: (T,)
    int64, place in the concatenation of both blocks, flattened.
    """

    prompt_places: Tensor
    response_places: Tensor
    prompt_real: Tensor
    response_real: Tensor
    prompt_of: Tensor
    places_back: Tensor

    @cached_property
    def visible(self) -> Tensor:
        """What each token of a response sees, (R, L, P + L) bool."""
        num_responses, num_places = self.response_places.shape
        causal = torch.ones(num_places, num_places, dtype=torch.bool).tril()
        return torch.cat(
            [
                self.prompt_real[self.prompt_of][:, None, :].expand(-1, num_places, -1),
                causal.expand(num_responses, -1, -1),  # padding comes after every real token, so causality hides it
            ],
            dim=2,
        )


def layout_of(row: MicroBatch) -> GroupLayout:
    """The layout of one micro-batch, on the CPU."""
    prompt_places, prompt_real = _padded(row.prompts[:, 0], row.prompts[:, 1])
    response_places, response_real = _padded(row.responses[:, 0], row.responses[:, 1])
    places_back = np.empty(row.num_tokens, np.int64)
    places_back[prompt_places[prompt_real]] = np.flatnonzero(prompt_real)
    places_back[response_places[response_real]] = prompt_real.size + np.flatnonzero(response_real)
    arrays = (prompt_places, response_places, prompt_real, response_real, row.responses[:, 2], places_back)
    return GroupLayout(*map(torch.from_numpy, arrays))


def _padded(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places start, start + 1, ... of each, padded to the longest: (count, longest) int64, and which are real."""
    offsets = np.arange(max(int(lengths.max()), 1))[None]
    is_real = offsets < lengths[:, None]
    return np.where(is_real, starts[:, None] + offsets, 0), is_real


def _kept(row: MicroBatch, device: torch.device) -> Flat:
    layout = layout_of(row)
    return lambda query, key, value: KeptAttention.apply(query, key, value, layout)


def _split(row: MicroBatch, device: torch.device) -> Flat:
    layout = layout_of(row)
    hidden = torch.zeros(layout.prompt_real.shape).masked_fill_(~layout.prompt_real, -torch.inf)[layout.prompt_of]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        prompts = [_picked(tensor, layout.prompt_places) for tensor in (query, key, value)]
        responses = [_picked(tensor, layout.response_places) for tensor in (query, key, value)]
        own = [_repeated(tensor, repeats) for tensor in responses[1:]]
        shared = [_repeated(Gathered.apply(tensor, layout.prompt_of), repeats) for tensor in prompts[1:]]
        from_prompts = scaled_dot_product_attention(
            prompts[0], _repeated(prompts[1], repeats), _repeated(prompts[2], repeats), is_causal=True
        )
        bias = hidden.to(query.dtype)[:, None, None]
        from_responses = SplitAttention.apply(responses[0], *shared, *own, bias)
        heads_last = (from_prompts.transpose(1, 2).flatten(0, 1), from_responses.transpose(1, 2).flatten(0, 1))
        return torch.cat(heads_last).index_select(0, layout.places_back)

    return attend


def _flash(row: MicroBatch, device: torch.device) -> Flat:
    key_places, num_queries, num_keys = flash_layout(row)
    arrays = (key_places, *(np.cumsum([0, *lengths], dtype=np.int32) for lengths in (num_queries, num_keys)))
    places, query_starts, key_starts = (on_device(array, device) for array in arrays)
    bounds = Boundaries(query_starts, key_starts, int(num_queries.max()), int(num_keys.max()))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_within(query, Gathered.apply(key, places), Gathered.apply(value, places), bounds)

    return attend


def flash_layout(row: MicroBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompts and responses as sequences in the row's own order, so that its queries need not be moved: the places of
    their keys one after the other, (U,) int64; and the number of queries and of keys of each, (S,) int64."""
    prompts = [(start, length, start, 0) for start, length in row.prompts.tolist()]
    responses = [
        (start, length, *row.prompts[prompt].tolist()) for start, length, prompt in row.responses.tolist() if length
    ]
    sequences = sorted(prompts + responses)
    places = [
        np.concatenate([np.arange(before, before + shared), np.arange(start, start + length)])
        for start, length, before, shared in sequences
    ]
    num_queries = np.array([length for _, length, _, _ in sequences])
    return np.concatenate(places), num_queries, np.array([len(own) for own in places])


def _causal(row: MicroBatch, device: torch.device) -> Flat:
    places, back = (on_device(array, device) for array in causal_layout(row))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        rows = [_picked(tensor, places) for tensor in (query, key, value)]
        out = scaled_dot_product_attention(
            rows[0], _repeated(rows[1], repeats), _repeated(rows[2], repeats), is_causal=True
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, back)

    return attend


def causal_layout(row: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
    """Each response behind its prompt in a row of its own, (R, longest) int64, places in the row, padding points at
    place 0; and (T,) int64, the place of each token in them, flattened: a prompt's before its first response."""
    prompts, responses = row.prompts.tolist(), row.responses.tolist()
    longest = max(prompts[prompt][1] + length for _, length, prompt in responses)
    places = np.zeros((len(responses), longest), np.int64)
    back = np.zeros(row.num_tokens, np.int64)
    for number, (start, length, prompt) in reversed(list(enumerate(responses))):
        before, shared = prompts[prompt]
        own = np.concatenate([np.arange(before, before + shared), np.arange(start, start + length)])
        places[number, : len(own)] = own
        back[own] = number * longest + np.arange(len(own))
    return places, back


WAYS: dict[Way, Callable[[MicroBatch, torch.device], Flat]] = {
    "kept": _kept,
    "split": _split,
    "flash": _flash,
    "causal": _causal,
}


class Gathered(torch.autograd.Function):
    """tensor (N, ...) at places (M,), which may repeat -> (M, ...); its gradient is summed in float32."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num = tensor.shape[0]
        return tensor.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        total = gradient.new_zeros(ctx.num, *gradient.shape[1:], dtype=torch.float32)
        return total.index_add_(0, places, gradient.float()).to(gradient.dtype), None


def _picked(tensor: Tensor, places: Tensor) -> Tensor:
    """(T, heads, D) at (B, L) -> (B, heads, L, D)."""
    return Gathered.apply(tensor, places.flatten()).unflatten(0, places.shape).transpose(1, 2)


def _repeated(tensor: Tensor, repeats: int) -> Tensor:
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)
