"""The weights that a trainer gives away, bucket by bucket: its own, those it gave last, or those of a folder.

Every rank takes part in bringing a bucket together on rank 0, which so holds one beside its own share. The ranks keep a
copy of their shares of what was given last: a sampler that has to take it again later gets the same bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nanodag.model.folder import read_tensors
from nanodag.sampler.weight_group import split
from nanodag.train.shares import in_buckets

NOW, KEPT = "now", "kept"
"""Which weights: the trainer's own, those that it gave last; any other word is a folder."""


class WeightSource(Protocol):
    """`Shares`, or what has its interface."""

    dtype: torch.dtype

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def num_bytes(self) -> Mapping[str, int]: ...

    def keep(self) -> None: ...

    def together(self, names: Sequence[str], *, kept: bool = False) -> Tensor | None: ...


class Buckets:
    """One rank's part. prefix: of the parameters' names, before those that transformers gives. bucket_bytes: most that
    is brought together at once, unless one tensor is larger."""

    def __init__(self, shares: WeightSource, *, rank: int, prefix: str, bucket_bytes: int) -> None:
        self._shares = shares
        self._rank = rank
        self._prefix = prefix
        self._buckets = list(in_buckets(list(shares.shapes), shares.num_bytes, bucket_bytes))

    def __len__(self) -> int:
        return len(self._buckets)

    def layout(self) -> list[dict[str, Any]]:
        """What is given, in its order: the fields of weight_bodies.Bucket."""
        dtype = str(self._shares.dtype).removeprefix("torch.")
        shapes = (self.shapes(number) for number in range(len(self)))
        return [
            {"names": list(of), "dtypes": [dtype] * len(of), "shapes": [list(shape) for shape in of.values()]}
            for of in shapes
        ]

    @property
    def dtype(self) -> torch.dtype:
        return self._shares.dtype

    def shapes(self, number: int) -> dict[str, tuple[int, ...]]:
        """Of the tensors in a bucket, by the names that transformers gives."""
        return {name.removeprefix(self._prefix): self._shares.shapes[name] for name in self._buckets[number]}

    def begin(self, which: str) -> None:
        """Before the first bucket: the trainer's own weights are kept as they are now."""
        if which == NOW:
            self._shares.keep()

    def together(self, number: int, which: str) -> Tensor | None:
        """A bucket's bytes on rank 0, (num_bytes,) uint8; None elsewhere. Every rank must call it."""
        if which in (NOW, KEPT):
            return self._shares.together(self._buckets[number], kept=which == KEPT)
        if self._rank > 0:
            return None
        tensors = read_tensors(Path(which), list(self.shapes(number)))
        return torch.cat([tensor.to(self.dtype).reshape(-1).view(torch.uint8) for tensor in tensors])

    def named(self, number: int, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors in a bucket's bytes; views."""
        shapes = self.shapes(number)
        return iter(split(flat, list(shapes), [self.dtype] * len(shapes), list(shapes.values())).items())

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """What was given last, tensor by tensor, on rank 0; nothing elsewhere, but every rank must walk through."""
        for number in range(len(self)):
            flat = self.together(number, KEPT)
            if flat is not None:
                yield from self.named(number, flat)
