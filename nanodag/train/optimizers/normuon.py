"""NorMuon: Muon with a second moment a row."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch import distributed as dist

from nanodag.config.supervised import OptimizerConfig
from nanodag.registry import entry
from nanodag.train.optimizer import Held, Segment
from nanodag.train.optimizers.muon import Muon, device_of

SECOND_MOMENTUM = 0.95


@entry("optimizer", "normuon", states=1, work_copies=5, work_elements=67_108_864)
class NorMuon(Muon):
    """Muon whose update is divided, row by row, by the root of its second moment, at the norm that its matrix had.

    A rank keeps moments of rows that begin in its pieces, and learns the others at each step. Source: arXiv:2510.05491.
    """

    def __init__(self, config: OptimizerConfig, held: Held) -> None:
        super().__init__(config, held)
        self._counts = [shape[0] for shape in held.shapes.values()]
        self._first = dict(zip(held.shapes, itertools.accumulate(self._counts, initial=0), strict=False))
        weights = {run.flat: run.weights for run in held.runs}
        for segment in held.segments:
            begin, end = (-(-place // segment.shape[1]) for place in (segment.offset, segment.offset + segment.length))
            owned = replace(segment, shape=segment.shape[:1], offset=begin, length=end - begin)
            self.rows.append((owned, torch.zeros(end - begin, device=weights[segment.flat].device)))

    def _adapt(self, pieces: Sequence[tuple[Segment, Tensor]]) -> None:
        device = device_of(pieces)
        means, moments = torch.zeros(2, sum(self._counts), device=device)
        for segment, piece in pieces:
            means[self._of_all(segment)] += _in_rows(segment, piece).square().mean(1)
        self._sum(means)
        for owned, moment in self.rows:
            where = slice(self._first[owned.name] + owned.offset, self._first[owned.name] + owned.offset + owned.length)
            moments[where] = moment.lerp_(means[where], 1 - SECOND_MOMENTUM)
        self._sum(moments)
        divided = means / moments.clamp(min=1e-20)
        factors = [
            (before.sum() / after.sum().clamp(min=1e-20) / moment.clamp(min=1e-20)).sqrt()
            for before, after, moment in zip(*(of.split(self._counts) for of in (means, divided, moments)), strict=True)
        ]
        factor = torch.cat(factors)
        for segment, piece in pieces:
            adapted, skipped = _in_rows(segment, piece) * factor[self._of_all(segment), None], segment.offset
            piece.copy_(adapted.flatten()[skipped % segment.shape[1] :][: segment.length])

    def _of_all(self, segment: Segment) -> slice:
        """Rows that a segment has elements of, among the rows of all matrices."""
        begin, end = segment.offset // segment.shape[1], -(-(segment.offset + segment.length) // segment.shape[1])
        return slice(self._first[segment.name] + begin, self._first[segment.name] + end)

    def _sum(self, values: Tensor) -> None:
        if self._held.sharded:
            dist.all_reduce(values)


def _in_rows(segment: Segment, piece: Tensor) -> Tensor:
    """A piece as rows of its matrix, with zeros where other pieces have the rest of the first and last row."""
    columns, end = segment.shape[1], segment.offset + segment.length
    return nn.functional.pad(piece, (segment.offset % columns, -end % columns)).view(-1, columns)
