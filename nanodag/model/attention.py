"""Attention of packed rows: causal in each sequence, which sees what it goes on from, too, maybe through a window.

Letters: B rows, T tokens a row, N = B * T, S sequences, Q tokens that ask, H query heads, K key-value heads (each
serves H / K query heads), D head width.

Sequences are packed documents, prompts with the responses that share them, or deeper trees: questions behind the same
examples, a question's answers. An `Attend` is made once a batch and serves every layer. It lays out on the host where
sequences lie, so that no device is waited for. The back ends, by what a machine does well:
- `own`: a CPU, heads of a multiple of 16: `attention.c` takes the rows as they are;
- `flash`: CUDA where `flash_takes` it: flash attention over variable lengths. The keys of a sequence are those of the
  ones that it goes on from, and its own;
- `plain`: elsewhere: each sequence that none goes on from, behind those that it goes on from, is a row of its own. Of
  the three it alone holds a mask of queries by keys, and only where rows are longer than a window.

Measured of `own` beside PyTorch's fused kernel under a mask, forward and backward of 16 rows of 256 tokens, two
documents a row, 6 heads of 32, one thread: 15 ms against 42 with AVX2, 11 against 39 with AVX-512, 9 against 40 there
in bfloat16.
"""

import ctypes
import inspect
import math
from collections.abc import Callable
from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from nanodag.model.c_library import DTYPES, c_library, fields, on_threads

SOURCE = Path(__file__).with_name("attention.c")
HEAD_UNIT = 16  # a head's width must be a multiple of it for `attention.c`

BackEnd = Literal["own", "flash", "plain"]
Sequences = NDArray[np.int64]
"""(S, 3) int64, by their start in the flattened rows: start, length, and the number of the one that a sequence goes on
from, -1 for none. What goes on from one follows it before any that does not. All tokens lie in a sequence."""
Places = NDArray[np.int64] | None
Flat = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
"""An `Attend` of flattened rows: query (N or Q, H, D), key and value (N, K, D), window."""


class Attend(Protocol):
    """query (B, T, H, D), key and value (B, T, K, D) -> as the query. window: tokens that one sees, itself among them;
    None: all before it."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor: ...


def document_attention(document_ids: np.ndarray) -> "Packed":
    """The Attend of packed documents. document_ids: (B, T) integers, one number a document within a row; padding -1."""
    return Packed(sequences_of_documents(document_ids))


def group_attention(prompts: NDArray[np.int64], responses: NDArray[np.int64]) -> "Packed":
    """The Attend of one row of prompts and responses, by `sequences_of_group`."""
    return Packed(sequences_of_group(prompts, responses))


@dataclass(eq=False)
class Packed:
    """The Attend of sequences, laid out on the query's device when it is first called. It says where they lie to a
    model that attends by code of its own.

    places: (Q,) int64, ascending, the tokens that ask, where not all do: of each sequence the last ones, of one row.
    Then query is (1, Q, H, D), and so is the result.
    """

    sequences: Sequences
    places: Places = None
    _made: list[Flat] = field(default_factory=list, init=False)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        if not self._made:
            self._made.append(BACK_ENDS[back_end_of(query)](self.sequences, self.places, query.device))
        return self._made[0](query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), window).view(query.shape)


def sequences_of_documents(document_ids: np.ndarray) -> Sequences:
    """Each document of the rows (B, T); padding too."""
    begins = np.ones(document_ids.shape, dtype=bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = np.flatnonzero(begins)
    return np.column_stack([starts, np.diff(starts, append=document_ids.size), np.full(len(starts), -1)])


def sequences_of_group(prompts: NDArray[np.int64], responses: NDArray[np.int64]) -> Sequences:
    """A row's prompts, each with its responses after it, as they lie in the row. prompts: (G, 2), start and length in
    the row. responses: (R, 3), start, length, number of the prompt; each lies behind its prompt, and may be empty."""
    responses = responses[responses[:, 1] > 0]
    order = np.argsort(np.concatenate([prompts[:, 0], responses[:, 0]]))
    places = np.concatenate([prompts, responses[:, :2]])[order]
    behind = np.concatenate([np.full(len(prompts), -1), np.argsort(order)[responses[:, 2]]])[order]
    return np.column_stack([places, behind])


def back_end_of(query: Tensor) -> BackEnd:
    """The back end for a query (B, T, H, D)."""
    if flash_takes(query.device, query.dtype, query.shape[-1]):
        return "flash"
    is_own = query.device.type == "cpu" and query.dtype in DTYPES and query.shape[-1] % HEAD_UNIT == 0
    return "own" if is_own else "plain"


def flash_takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True where PyTorch's flash attention has a kernel: from Ampere on, in 16 bits, for heads of 8, 16, ... 256."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of an array on a device; on the CPU the array itself. The copy to a GPU goes on while the host does: it is
    made from pinned memory, for from any other CUDA copies before the call returns."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _asking(sequences: Sequences, places: Places) -> np.ndarray:
    """First row of each sequence's queries, and their number, (S, 2) int64."""
    if places is None:
        return np.ascontiguousarray(sequences[:, :2])
    rows = np.searchsorted(places, np.stack([sequences[:, 0], sequences[:, :2].sum(1)], axis=1))
    return np.stack([rows[:, 0], rows[:, 1] - rows[:, 0]], axis=1)


def _keys_of(sequences: Sequences) -> list[np.ndarray]:
    """The places of the keys of each sequence: of those that it goes on from, and its own."""
    keys: list[np.ndarray] = []
    for start, length, behind in sequences.tolist():
        own = np.arange(start, start + length)
        keys.append(own if behind < 0 else np.concatenate([keys[behind], own]))
    return keys


def _plain(sequences: Sequences, places: Places, device: torch.device) -> Flat:
    # Rows of trees are long and few; documents in classes by powers of two fill up at most half.
    arrays, order = length_classes(sequences, 2.0 if (sequences[:, 2] < 0).all() else math.inf)
    classes, back = [on_device(array, device) for array in arrays], on_device(order, device)
    asking = None if places is None else on_device(places, device)

    def attend(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        if asking is not None:  # rows are computed whole: the others ask with zeros, and are not answered
            query = query.new_zeros(len(back), *query.shape[1:]).index_copy(0, asking, query)
        results = []
        for in_rows in classes:
            picked = (Gathered.apply(tensor, in_rows.flatten()) for tensor in (query, key, value))
            rows = [tensor.unflatten(0, in_rows.shape).transpose(1, 2) for tensor in picked]  # (R, heads, L, D)
            key_rows, value_rows = (tensor.repeat_interleave(repeats, dim=1) for tensor in rows[1:])
            length = in_rows.shape[1]
            mask = None  # each query sees all before it
            if window is not None and window < length:
                mask = torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)
            out = scaled_dot_product_attention(rows[0], key_rows, value_rows, mask, is_causal=mask is None)
            results.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(results).index_select(0, back if asking is None else back[asking])

    return attend


def length_classes(sequences: Sequences, ratio: float) -> tuple[list[np.ndarray], np.ndarray]:
    """Sequences that none goes on from, each behind those that it goes on from, in classes of lengths above one power
    of `ratio` and up to the next: of each class the places of the tokens, (R, longest) int64, a sequence a row, filled
    up with its first place; and (N,) int64, where each token lies in all rows of all classes, flattened, in the first
    of its rows."""
    ends = sorted(set(range(len(sequences))) - set(sequences[:, 2].tolist()))
    keys = _keys_of(sequences)
    lengths = np.array([len(keys[end]) for end in ends])
    powers = np.ceil(np.log(lengths) / math.log(ratio) - 1e-9).astype(int)
    classes = []
    back = np.full(int(sequences[:, :2].sum(1).max()), -1, np.int64)
    first = 0
    for power in np.unique(powers):
        chosen = [keys[ends[number]] for number in np.flatnonzero(powers == power)]
        longest = max(map(len, chosen))
        for row, own in enumerate(chosen):
            is_new = back[own] < 0
            back[own[is_new]] = first + row * longest + np.flatnonzero(is_new)
        classes.append(np.stack([np.pad(own, (0, longest - len(own)), constant_values=own[0]) for own in chosen]))
        first += len(chosen) * longest
    return classes, back


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


def _flash(sequences: Sequences, places: Places, device: torch.device) -> Flat:
    key_places, num_queries, num_keys = flash_layout(sequences, places)
    starts = (np.cumsum([0, *lengths], dtype=np.int32) for lengths in (num_queries, num_keys))
    query_starts, key_starts = (on_device(array, device) for array in starts)
    bounds = (query_starts, key_starts, int(num_queries.max()), int(num_keys.max()))
    keys_at = None if key_places is None else on_device(key_places, device)

    def attend(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        if keys_at is not None:
            key, value = Gathered.apply(key, keys_at), Gathered.apply(value, keys_at)
        return attend_within(query, key, value, bounds, window)

    return attend


def flash_layout(sequences: Sequences, places: Places = None) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """The sequences in the rows' own order, so that queries need not be moved: the places of their keys one after the
    other, (U,) int64, None where these need not be moved either; and the number of queries and of keys of each, (S,)
    int64. One that asks nothing is left out."""
    if places is None and (sequences[:, 2] < 0).all():
        return None, sequences[:, 1], sequences[:, 1]
    num_queries = _asking(sequences, places)[:, 1]
    keys = [own for own, count in zip(_keys_of(sequences), num_queries.tolist(), strict=True) if count]
    return np.concatenate(keys), num_queries[num_queries > 0], np.array([len(own) for own in keys])


Boundaries = tuple[Tensor, Tensor, int, int]
"""Bounds of sequences that lie one after the other, none empty: where the queries of each begin, and the end, (S + 1,)
int32; where its keys do; tokens of the longest query, and of the longest key."""


def attend_within(query: Tensor, key: Tensor, value: Tensor, bounds: Boundaries, window: int | None) -> Tensor:
    """Causal attention in each sequence: query (T, H, D), key and value (U, K, D) -> (T, H, D).

    Where a sequence has more keys than queries, its last query sees all of them, the one before all but the last.
    """
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer key-value heads without being told, and knows no such option.
    knows = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if knows else {}
    seen = (-1 if window is None else window - 1, 0)
    out = varlen_attn(query, key, value, *bounds, window_size=seen, **options)
    assert isinstance(out, Tensor)  # of the two that varlen_attn may return, the one without statistics
    return out


def _own(sequences: Sequences, places: Places, device: torch.device) -> Flat:
    pieces = pieces_of(sequences, places)
    return lambda query, key, value, window: CpuAttention.apply(query, key, value, pieces, window)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Sequences as `attention.c` takes them.

    groups: (G + 1,) int64, the first piece of each tree; at last the number of pieces. pieces: (S, 2) int64, first
    token and number of tokens; a tree's in the order of a walk down. before: (S,) int64, tokens that each goes on from.
    queries: (S, 2) int64, of each the first row of its queries and their number: all its tokens ask, or the last ones.
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
        """True where all pieces of a group go on from its first, or from none, as a backward pass needs it."""
        first = np.repeat(self.pieces[self.groups[:-1], 1], np.diff(self.groups))
        return bool(((self.before == 0) | (self.before == first)).all())


def pieces_of(sequences: Sequences, places: Places = None) -> Pieces:
    """The sequences for `attention.c`."""
    groups = np.append(np.flatnonzero(sequences[:, 2] < 0), len(sequences))
    before = np.zeros(len(sequences), np.int64)
    for number in np.flatnonzero(sequences[:, 2] >= 0).tolist():
        parent = sequences[number, 2]
        before[number] = before[parent] + sequences[parent, 1]
    return Pieces(groups, np.ascontiguousarray(sequences[:, :2]), before, _asking(sequences, places))


class CpuAttention(torch.autograd.Function):
    """query (Q, H, D), key and value (N, K, D), pieces, window -> (Q, H, D)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, window: int | None) -> Tensor:
        assert query.dtype == key.dtype == value.dtype, "C reads all of them as one type"
        query, key, value = (_dense_heads(tensor) for tensor in (query, key, value))
        output = torch.empty(query.shape, dtype=query.dtype)
        logsumexp = torch.empty(query.shape[:2])
        _run(pieces, window, logsumexp, backward=False, query=query, key=key, value=value, output=output)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.pieces, ctx.window = pieces, window
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        assert ctx.pieces.is_flat, "pieces that go on from others than their group's first have no gradient"
        gradients = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in (query, key, value)]
        _run(
            ctx.pieces,
            ctx.window,
            logsumexp,
            backward=True,
            query=query,
            key=key,
            value=value,
            output=output,
            d_output=_dense_heads(d_output),
            **dict(zip(("d_query", "d_key", "d_value"), gradients, strict=True)),
        )
        return *gradients, None, None


class _Tokens(Structure):
    _fields_ = [("at", c_void_p), ("stride", c_int64)]


class _Attention(Structure):
    _fields_ = [
        *fields(c_int64, "num_groups num_heads num_kv_heads head_dim is_bf16 longest window"),
        *fields(c_void_p, "groups pieces before queries logsumexp"),
        *fields(_Tokens, "query key value output d_output d_query d_key d_value"),
    ]


def _dense_heads(tensor: Tensor) -> Tensor:
    """The tensor itself where a token's heads lie without gaps."""
    is_dense = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    return tensor if is_dense else tensor.contiguous()


def _run(pieces: Pieces, window: int | None, logsumexp: Tensor, *, backward: bool, **tensors: Tensor) -> None:
    query, key = tensors["query"], tensors["key"]
    arguments = _Attention(
        num_groups=len(pieces.groups) - 1,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[2],
        is_bf16=query.dtype == torch.bfloat16,
        longest=pieces.longest,
        window=pieces.longest if window is None else window,
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


_TYPES = {"scratch_size": ([c_void_p], c_int64), "attention": ([c_void_p, c_int64, c_void_p, c_void_p], None)}
_library = cache(partial(c_library, SOURCE, "the attention of training on a CPU", _TYPES))


BACK_ENDS: dict[BackEnd, Callable[[Sequences, Places, torch.device], Flat]] = {
    "own": _own,
    "flash": _flash,
    "plain": _plain,
}
