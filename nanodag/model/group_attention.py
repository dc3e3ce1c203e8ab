"""Attention for a row in which several responses share one prompt: RL's rollouts of a group, a question's answers.

Every prompt attends causally to itself; every response to its prompt and causally to itself. Linear layers run over the
packed row without padding. Which way, by what the device does well; none holds a mask of queries by keys:
- `own`: a CPU, heads of a multiple of 16: our own code takes the row as it is (nanodag.model.cpu_attention);
- `flash`: CUDA where flash attention takes it: prompts and responses are sequences of variable length, without padding,
  and the keys of a response are its prompt's and its own;
- `causal`: elsewhere: each response behind its prompt, as a row of its own.

Letters beyond those of packing: Q tokens that ask, H query heads, K key-value heads, D head width.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from nanodag.model.attention import Attend, Boundaries, attend_within, flash_takes, on_device
from nanodag.model.cpu_attention import CpuAttention, Pieces, can_attend

Way = Literal["own", "flash", "causal"]
Flat = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query (T or Q, H, D), key and value (T, K, D) -> as the query."""
Places = NDArray[np.int64] | None


class GroupedRow(Protocol):
    """prompts: (G, 2) int64, start and length in the row. responses: (R, 3) int64, start, length, number of the prompt;
    each lies behind its prompt, and each prompt has one, which may be empty. num_tokens: of the row."""

    @property
    def prompts(self) -> NDArray[np.int64]: ...

    @property
    def responses(self) -> NDArray[np.int64]: ...

    @property
    def num_tokens(self) -> int: ...


def group_attention(row: GroupedRow, places: Places = None) -> Attend:
    """The Attend of one row: query (1, T, H, D), key and value (1, T, K, D) -> (1, T, H, D). What it needs to know of
    the row is laid out on the query's device when it is first called.

    places: (Q,) ascending, the tokens that ask, where not all do: of each prompt and each response the last ones. Then
    query is (1, Q, H, D), and so is what is returned.
    """
    made: list[Flat] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not made:
            made.append(WAYS[way_of(query)](row, places, query.device))
        return made[0](query[0], key[0], value[0])[None]

    return attend


def way_of(query: Tensor) -> Way:
    """How a row is attended to. query: (1, T, H, D)."""
    if flash_takes(query.device, query.dtype, query.shape[3]):
        return "flash"
    return "own" if can_attend(query) else "causal"


def _own(row: GroupedRow, places: Places, device: torch.device) -> Flat:
    pieces = pieces_of(row, places)
    return lambda query, key, value: CpuAttention.apply(query, key, value, pieces)


def pieces_of(row: GroupedRow, places: Places = None) -> Pieces:
    """The row's prompts, each with its responses after it, as they lie in the row."""
    order = np.argsort(np.concatenate([row.prompts[:, 0], row.responses[:, 0]]), kind="stable")
    pieces = np.concatenate([row.prompts, row.responses[:, :2]])[order]
    groups = np.append(np.flatnonzero(order < len(row.prompts)), len(pieces))
    seen = row.prompts[row.responses[:, 2], 1] + row.responses[:, 1]
    longest = int(max(row.prompts[:, 1].max(), seen.max(initial=0)))
    return Pieces(groups, pieces, longest, pieces if places is None else _asking(pieces, places))


def _asking(sequences: np.ndarray, places: NDArray[np.int64]) -> np.ndarray:
    """Of each sequence, start and length (S, 2): the first row of its queries and their number, (S, 2) int64."""
    rows = np.searchsorted(places, np.stack([sequences[:, 0], sequences.sum(1)], axis=1))
    return np.ascontiguousarray(np.stack([rows[:, 0], rows[:, 1] - rows[:, 0]], axis=1))


def _flash(row: GroupedRow, places: Places, device: torch.device) -> Flat:
    key_places, num_queries, num_keys = flash_layout(row, places)
    arrays = (key_places, *(np.cumsum([0, *lengths], dtype=np.int32) for lengths in (num_queries, num_keys)))
    keys_at, query_starts, key_starts = (on_device(array, device) for array in arrays)
    bounds = Boundaries(query_starts, key_starts, int(num_queries.max()), int(num_keys.max()))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_within(query, Gathered.apply(key, keys_at), Gathered.apply(value, keys_at), bounds)

    return attend


def flash_layout(row: GroupedRow, places: Places = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompts and responses as sequences in the row's own order, so that its queries need not be moved: the places of
    their keys one after the other, (U,) int64; and the number of queries and of keys of each, (S,) int64. A sequence
    that asks nothing is left out."""
    prompts = [(start, length, start, 0) for start, length in row.prompts.tolist()]
    responses = [
        (start, length, *row.prompts[prompt].tolist()) for start, length, prompt in row.responses.tolist() if length
    ]
    sequences = np.array(sorted(prompts + responses))
    num_queries = sequences[:, 1] if places is None else _asking(sequences[:, :2], places)[:, 1]
    sequences, num_queries = sequences[num_queries > 0], num_queries[num_queries > 0]
    keys_at = [
        np.concatenate([np.arange(before, before + shared), np.arange(start, start + length)])
        for start, length, before, shared in sequences
    ]
    return np.concatenate(keys_at), num_queries, np.array([len(own) for own in keys_at])


def _causal(row: GroupedRow, places: Places, device: torch.device) -> Flat:
    in_rows, back = (on_device(array, device) for array in causal_layout(row))
    asking = None if places is None else on_device(places, device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        if asking is not None:  # such a row is computed whole: the others ask with zeros, and are not answered
            query = query.new_zeros(row.num_tokens, *query.shape[1:]).index_copy(0, asking, query)
        rows = [_picked(tensor, in_rows) for tensor in (query, key, value)]
        out = scaled_dot_product_attention(
            rows[0], _repeated(rows[1], repeats), _repeated(rows[2], repeats), is_causal=True
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, back if asking is None else back[asking])

    return attend


def causal_layout(row: GroupedRow) -> tuple[np.ndarray, np.ndarray]:
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


WAYS: dict[Way, Callable[[GroupedRow, Places, torch.device], Flat]] = {
    "own": _own,
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
