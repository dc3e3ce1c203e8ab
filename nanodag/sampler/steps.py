"""A step of all running samples, in torch or in one compiled call after another; and the numbers of rows at which it
gives the same bits in every row on this machine.

Both move the slot table on: ``decode`` by the tokens that were drawn last, ``draw`` by one new token a sample.

A matmul library picks its kernel by the shape, and may treat rows at the edge of a tile differently; nothing promises
that row 3 of 64 gets the same bits as row 0 of 1. Deterministic mode needs that, so it is tried: one sample is put into
every slot and decoded at every size. Kernels are chosen by shape and never by values, so what holds for some dense
random weights holds for all.
"""

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Structure, c_int64, c_void_p

import numpy as np
import torch

from nanodag.errors import SamplerError
from nanodag.sampler.decode_views import ATTENTION_CHUNK
from nanodag.sampler.drawing import draw, likeliest
from nanodag.sampler.kernel import Kernel
from nanodag.sampler.model import SamplerModel
from nanodag.sampler.slots import SlotTable
from nanodag.sampler.transformers_sampler import TransformersSampler

log = logging.getLogger(__name__)
NO_ROWS = np.zeros(0, dtype=np.int64)
_ENDED, _BROKEN = 1, 2


class TorchSteps:
    """Steps for every device and dtype."""

    def __init__(self, model: SamplerModel | TransformersSampler, table: SlotTable) -> None:
        self._model, self._table = model, table

    def decode(self, rows: int) -> None:
        """Run the last token of the samples in the first ``rows`` rows."""
        table, active = self._table, self._table.active_rows
        longest = int(table.positions[active].max()) + 1
        length = read_length(longest, self._model.capacity, in_chunks=self._model.deterministic)
        self._model.retain(active)
        self._model.decode(table.tokens[:rows], table.positions[:rows], length)
        table.positions[active] += 1

    def draw(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw and record a token for each sample in the first ``rows`` rows.

        Returns the rows that end with it, and those whose scores are not finite, for which nothing was recorded:
        int64, ascending.
        """
        table, active = self._table, self._table.active_rows
        settings = table.draw_settings(rows)
        scores = self._model.logits(rows, settings.inverse_temperature)
        _tell(scores, table)
        tokens, logprobs = draw(scores, settings, table.counts[:rows])
        broken = active[np.isnan(logprobs[active])]
        if len(broken):
            active = np.setdiff1d(active, broken)
        return table.record(active, tokens[active], logprobs[active]), broken


def read_length(needed: int, capacity: int, *, in_chunks: bool) -> int:
    """Length of the cache that a step reads to see ``needed`` tokens: rounded up, so that there are few shapes.

    in_chunks: to whole chunks of attention, as deterministic mode needs.
    """
    unit = ATTENTION_CHUNK if in_chunks else ATTENTION_CHUNK // 2
    while needed > 16 * unit:
        unit *= 2
    return min(-(-needed // unit) * unit, capacity)


def _tell(scores: torch.Tensor, table: SlotTable) -> None:
    """Keep the likeliest tokens of the rows that tell them. scores: (R, V) float32, before anything is drawn."""
    if not table.told:
        return
    rows = sorted(table.told)
    counts = [table.sample_at(row).running.num_top for row in rows]
    for row, count, top in zip(rows, counts, likeliest(scores[rows], max(counts)), strict=True):
        table.sample_at(row).top_logprobs.append(top[:count])


class _Table(Structure):
    _fields_ = [
        ("capacity", c_int64),
        ("stop_width", c_int64),
        *(
            (name, c_void_p)
            for name in (
                "active", "greedy", "temperature", "top_p", "top_k", "limits", "stop_ids", "keys", "tokens",
                "positions", "counts", "output_ids", "logprobs", "drawn_tokens", "drawn_logprobs", "outcomes",
            )
        ),
    ]  # fmt: skip


class CompiledSteps:
    """TorchSteps in compiled code: arrays of the table are handed over once, not at every token."""

    def __init__(self, kernel: Kernel, table: SlotTable) -> None:
        self._kernel, self._library, self._table = kernel, kernel.library, table
        self._drawn_tokens = np.zeros(table.num_slots, dtype=np.int64)
        self._drawn_logprobs = np.zeros(table.num_slots)
        self._outcomes = np.zeros(table.num_slots, dtype=np.uint8)
        drawn = {"drawn_tokens": self._drawn_tokens, "drawn_logprobs": self._drawn_logprobs, "outcomes": self._outcomes}
        kept = [name for name, *_ in _Table._fields_ if name not in drawn and hasattr(table, name)]
        self._arrays = {name: getattr(table, name) for name in kept} | drawn
        self._stop_ids = table.stop_ids
        self._addresses = _Table(
            capacity=table.output_ids.shape[1],
            stop_width=table.stop_ids.shape[1],
            **{name: array.ctypes.data for name, array in self._arrays.items()},
        )
        self._references = (kernel.reference, ctypes.byref(self._addresses))

    def decode(self, rows: int) -> None:
        """Each row reads as much of the cache as it has."""
        self._library.decode(*self._references, rows)

    def score(self, rows: int) -> torch.Tensor:
        """Model.logits of the first ``rows`` rows over their temperatures."""
        self._library.logits(*self._references, rows)
        return self._kernel.logits[:rows]

    def draw(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        table = self._table
        if table.stop_ids is not self._stop_ids:  # a request came with more of them than any before
            self._stop_ids = table.stop_ids
            self._addresses.stop_ids = table.stop_ids.ctypes.data
            self._addresses.stop_width = table.stop_ids.shape[1]
        scores = self.score(rows)
        _tell(scores, table)
        cut_off, settings = table.draw_settings(rows).cut_off
        if settings is not None:
            drawn = draw(scores[torch.from_numpy(cut_off)], settings, table.counts[cut_off])
            self._drawn_tokens[cut_off], self._drawn_logprobs[cut_off] = drawn
        if not self._library.draw(*self._references, rows):  # how many rows do not go on
            return NO_ROWS, NO_ROWS
        outcomes = self._outcomes[:rows]
        return np.flatnonzero(outcomes == _ENDED), np.flatnonzero(outcomes == _BROKEN)


def row_sizes(num_slots: int) -> tuple[int, ...]:
    """Numbers of rows that a step may have: few enough that their views stay cached, close enough to waste little."""
    return tuple(sorted({size for size in (1, 2, 4, *range(8, num_slots, 8)) if size < num_slots} | {num_slots}))


def invariant_row_sizes(model: SamplerModel) -> tuple[int, ...]:
    """Sizes, ascending, at which every row has the same bits, and the same at every size and every length read.

    The largest size decides: a smaller size that differs from it is left out. If rows differ among themselves at the
    full number of slots, the next smaller size is tried. Size 1 alone is always invariant.

    The model's slots are overwritten; call this before any request. Raises SamplerError if no size will do.
    """
    candidates = [size for size in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256) if size < model.num_slots]
    candidates.append(model.num_slots)
    with _random_weights(model):
        for largest in reversed(candidates):
            reference = _bits(model, largest)
            if reference is not None:
                break
        if reference is None:
            raise SamplerError(
                "deterministic mode cannot work here: one row alone differs with the length that is read"
            )
        smaller = [size for size in candidates if size < largest and _equal(_bits(model, size), reference)]
    if largest < model.num_slots:
        log.warning("deterministic mode uses %d of %d slots: more rows differ in bits here", largest, model.num_slots)
    return (*smaller, largest)


@contextmanager
def _random_weights(model: SamplerModel) -> Iterator[None]:
    """Try with dense random weights: a freshly initialised model has zero matrices, which hide how sums are ordered."""
    generator = torch.Generator(device=model.device).manual_seed(0)
    kept = [tensor.clone() for tensor in model.weights.tensors()]
    try:
        for tensor in model.weights.tensors():
            tensor.uniform_(-1.0, 1.0, generator=generator).div_(tensor.shape[0] ** 0.5)
        yield
    finally:
        for tensor, original in zip(model.weights.tensors(), kept, strict=True):
            tensor.copy_(original)


def _bits(model: SamplerModel, rows: int) -> list[torch.Tensor] | None:
    """Results of every row; None if rows differ, or differ with the length read."""
    prompt = np.random.default_rng(0).integers(0, model.architecture.vocab_size, size=min(24, model.capacity - 1))
    tokens, positions = np.full(rows, int(prompt[0])), np.full(rows, len(prompt))
    seen: list[torch.Tensor] | None = None
    for length in (ATTENTION_CHUNK * count for count in (1, 2, 3, 8) if ATTENTION_CHUNK * count <= model.capacity):
        model.prefill([prompt], [list(range(model.num_slots))])
        model.decode(tokens, positions, length)
        scores = model.logits(rows, None).clone()
        results = [model.buffers.hidden[:rows].clone(), scores, torch.softmax(scores, dim=-1)]
        first = [tensor[0] for tensor in results]
        is_uneven = any(not torch.equal(tensor, tensor[:1].expand_as(tensor)) for tensor in results)
        if is_uneven or (seen is not None and not _equal(first, seen)):
            return None
        seen = first
    return seen


def _equal(one: list[torch.Tensor] | None, other: list[torch.Tensor] | None) -> bool:
    if one is None or other is None:
        return False
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
