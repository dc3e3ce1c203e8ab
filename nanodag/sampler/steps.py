"""A step of all running samples, in torch or in one compiled call after another.

Both move the slot table on: ``decode`` by the tokens that were drawn last, ``draw`` by one new token a sample.
"""

import ctypes
from ctypes import Structure, c_int64, c_void_p

import numpy as np
import torch

from nanodag.inference.cache_size import slot_tokens
from nanodag.model.c_library import fields
from nanodag.sampler.drawing import draw, likeliest
from nanodag.sampler.kernel import Kernel
from nanodag.sampler.model import SamplerModel
from nanodag.sampler.slots import SlotTable
from nanodag.sampler.transformers_sampler import TransformersSampler

NO_ROWS = np.zeros(0, dtype=np.int64)
_ENDED, _BROKEN = 1, 2


class TorchSteps:
    """Steps for every device and dtype."""

    def __init__(self, model: SamplerModel | TransformersSampler, table: SlotTable) -> None:
        self._model, self._table = model, table

    def decode(self, rows: int) -> None:
        """Run the last token of the samples in the first ``rows`` rows."""
        table, active = self._table, self._table.active_rows
        self._model.retain(active)
        longest = int(table.positions[active].max()) + 1
        self._model.decode(table.tokens[:rows], table.positions[:rows], slot_tokens(longest))
        table.positions[active] += 1

    def draw(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw and record a token for each sample in the first ``rows`` rows. Returns the rows that end with it, and
        those whose scores are not finite, for which nothing was recorded: int64, ascending."""
        table, active = self._table, self._table.active_rows
        settings = table.draw_settings(rows)
        scores = self._model.logits(rows, settings.inverse_temperature)
        _tell(scores, table)
        tokens, logprobs = draw(scores, settings, table.counts[:rows])
        broken = active[np.isnan(logprobs[active])]
        if len(broken):
            active = np.setdiff1d(active, broken)
        return table.record(active, tokens[active], logprobs[active]), broken


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
        *fields(c_int64, "capacity stop_width"),
        *fields(c_void_p, "active greedy temperature top_p top_k limits stop_ids keys tokens positions counts"),
        *fields(c_void_p, "output_ids logprobs drawn_tokens drawn_logprobs outcomes"),
    ]


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
