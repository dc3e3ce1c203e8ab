"""Attention for a row in which sequences share what they begin with: RL's rollouts of a group, a question's answers,
questions behind the same examples.

Every sequence attends causally to itself, and to all of those that it goes on from. Linear layers run over the packed
row without padding. Which way, by what the device does well; none holds a mask of queries by keys:
- `own`: a CPU, heads of a multiple of 16: our own code takes the row as it is (nanodag.model.cpu_attention);
- `flash`: CUDA where flash attention takes it: sequences of variable length, without padding, and the keys of each are
  those of the ones that it goes on from, and its own;
- `causal`: elsewhere: each sequence that none goes on from behind those that it goes on from, as a row of its own.

Letters beyond those of packing: S sequences, Q tokens that ask, H query heads, K key-value heads, D head width.
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
Sequences = NDArray[np.int64]
"""(S, 3) int64, by their start in the row: start, length, and the number of the one that a sequence goes on from, -1
for none. What goes on from one follows it before any that does not."""
Places = NDArray[np.int64] | None


class GroupedRow(Protocol):
    """prompts: (G, 2) int64, start and length in the row. responses: (R, 3) int64, start, length, number of the prompt;
    each lies behind its prompt, and may be empty."""

    @property
    def prompts(self) -> NDArray[np.int64]: ...

    @property
    def responses(self) -> NDArray[np.int64]: ...


def group_attention(row: GroupedRow) -> Attend:
    """The Attend of prompts and responses."""
    return tree_attention(sequences_of(row))


def sequences_of(row: GroupedRow) -> Sequences:
    """A row's prompts, each with its responses after it, as they lie in the row."""
    responses = row.responses[row.responses[:, 1] > 0]
    order = np.argsort(np.concatenate([row.prompts[:, 0], responses[:, 0]]))
    found = np.concatenate([row.prompts, responses[:, :2]])[order]
    behind = np.concatenate([np.full(len(row.prompts), -1), np.argsort(order)[responses[:, 2]]])[order]
    return np.column_stack([found, behind])


def tree_attention(sequences: Sequences, places: Places = None) -> Attend:
    """The Attend of one row: query (1, T, H, D), key and value (1, T, K, D) -> (1, T, H, D). What it needs to know of
    the row is laid out on the query's device when it is first called.

    places: (Q,) int64, ascending, the tokens that ask, where not all do: of each sequence the last ones. Then query is
    (1, Q, H, D), and so is what is returned.
    """
    made: list[Flat] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not made:
            made.append(WAYS[way_of(query)](sequences, places, query.device))
        return made[0](query[0], key[0], value[0])[None]

    return attend


def way_of(query: Tensor) -> Way:
    """How a row is attended to. query: (1, T, H, D)."""
    if flash_takes(query.device, query.dtype, query.shape[3]):
        return "flash"
    return "own" if can_attend(query) else "causal"


def _own(sequences: Sequences, places: Places, device: torch.device) -> Flat:
    pieces = pieces_of(sequences, places)
    return lambda query, key, value: CpuAttention.apply(query, key, value, pieces)


def pieces_of(sequences: Sequences, places: Places = None) -> Pieces:
    """The sequences for our own code."""
    pieces = np.ascontiguousarray(sequences[:, :2])
    groups = np.append(np.flatnonzero(sequences[:, 2] < 0), len(sequences))
    before = np.zeros(len(sequences), np.int64)
    for number in np.flatnonzero(sequences[:, 2] >= 0).tolist():
        parent = sequences[number, 2]
        before[number] = before[parent] + sequences[parent, 1]
    return Pieces(groups, pieces, before, pieces if places is None else _asking(pieces, places))


def _asking(pieces: np.ndarray, places: NDArray[np.int64]) -> np.ndarray:
    """Of each piece, start and length (S, 2): the first row of its queries and their number, (S, 2) int64."""
    rows = np.searchsorted(places, np.stack([pieces[:, 0], pieces.sum(1)], axis=1))
    return np.stack([rows[:, 0], rows[:, 1] - rows[:, 0]], axis=1)


def _keys_of(sequences: Sequences) -> list[np.ndarray]:
    """The places of what each sequence sees: those that it goes on from, and itself."""
    found: list[np.ndarray] = []
    for start, length, behind in sequences.tolist():
        own = np.arange(start, start + length)
        found.append(own if behind < 0 else np.concatenate([found[behind], own]))
    return found


def _flash(sequences: Sequences, places: Places, device: torch.device) -> Flat:
    key_places, num_queries, num_keys = flash_layout(sequences, places)
    arrays = (key_places, *(np.cumsum([0, *lengths], dtype=np.int32) for lengths in (num_queries, num_keys)))
    keys_at, query_starts, key_starts = (on_device(array, device) for array in arrays)
    bounds = Boundaries(query_starts, key_starts, int(num_queries.max()), int(num_keys.max()))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_within(query, Gathered.apply(key, keys_at), Gathered.apply(value, keys_at), bounds)

    return attend


def flash_layout(sequences: Sequences, places: Places = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The sequences in the row's own order, so that its queries need not be moved: the places of their keys one after
    the other, (U,) int64; and the number of queries and of keys of each, (S,) int64. One that asks nothing is left out.
    """
    num_queries = sequences[:, 1] if places is None else _asking(sequences[:, :2], places)[:, 1]
    keys = [own for own, count in zip(_keys_of(sequences), num_queries.tolist(), strict=True) if count]
    return np.concatenate(keys), num_queries[num_queries > 0], np.array([len(own) for own in keys])


def _causal(sequences: Sequences, places: Places, device: torch.device) -> Flat:
    in_rows, back = (on_device(array, device) for array in causal_layout(sequences))
    asking = None if places is None else on_device(places, device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        if asking is not None:  # such a row is computed whole: the others ask with zeros, and are not answered
            query = query.new_zeros(len(back), *query.shape[1:]).index_copy(0, asking, query)
        rows = [_picked(tensor, in_rows) for tensor in (query, key, value)]
        out = scaled_dot_product_attention(
            rows[0], _repeated(rows[1], repeats), _repeated(rows[2], repeats), is_causal=True
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, back if asking is None else back[asking])

    return attend


def causal_layout(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Each sequence that none goes on from, with those that it goes on from, in a row of its own, (R, longest) int64,
    places in the row, padding points at place 0; and (T,) int64, the place of each token in them, flattened: that of
    what several go on from in the first of their rows."""
    ends = sorted(set(range(len(sequences))) - set(sequences[:, 2].tolist()))
    keys = _keys_of(sequences)
    longest = max(len(keys[end]) for end in ends)
    places = np.zeros((len(ends), longest), np.int64)
    back = np.zeros(int(sequences[:, :2].sum(1).max()), np.int64)
    for number, end in reversed(list(enumerate(ends))):
        places[number, : len(keys[end])] = keys[end]
        back[keys[end]] = number * longest + np.arange(len(keys[end]))
    return places, back


WAYS: dict[Way, Callable[[Sequences, Places, torch.device], Flat]] = {
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
