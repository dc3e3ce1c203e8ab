"""The trainer's half of the distributed weight sync: its rank 0 broadcasts the weights to the samplers, by buckets.

Every rank takes part in bringing a bucket together on rank 0, which so never holds more than one beside its own share.
A sampler that dies or hangs ends a broadcast with an error; rank 0 then leaves the group and says so, the ranks go on
in step, and the controller gives the weights another way.
"""

import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from nanodag.sampler.fingerprints import Fingerprints
from nanodag.sampler.weight_group import WeightGroup, open_store, split
from nanodag.train.shares import Shares, in_buckets

log = logging.getLogger(__name__)


class Broadcaster:
    """One rank's part. prefix: of the parameters' names, before those that transformers gives. bucket_bytes: most that
    is brought together at once, unless one tensor is larger. timeout_s: most that one broadcast may take."""

    def __init__(self, shares: Shares, *, rank: int, prefix: str, bucket_bytes: int, timeout_s: float) -> None:
        self._shares = shares
        self._rank = rank
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._buckets = list(in_buckets(list(shares.shapes), shares.num_bytes, bucket_bytes))
        self._joining: dict[str, Any] = {}
        self._group: WeightGroup | None = None

    def layout(self) -> list[dict[str, Any]]:
        """What is broadcast, in its order: the fields of protocol.Bucket."""
        dtype = str(self._shares.dtype).removeprefix("torch.")
        return [
            {
                "names": [name.removeprefix(self._prefix) for name in names],
                "dtypes": [dtype] * len(names),
                "shapes": [list(self._shares.shapes[name]) for name in names],
            }
            for names in self._buckets
        ]

    def open(self, name: str, size: int) -> int:
        """Leave the group that there was, and wait for another's members from now on. Returns rank 0's port."""
        if self._rank > 0:
            return 0
        self.close()
        store = open_store(self._timeout_s)
        self._joining = {"store": store, "name": name, "rank": 0, "size": size, "timeout_s": self._timeout_s}
        return store.port

    def send(self, fingerprints: Fingerprints | None) -> str:
        """Broadcast the weights, and keep this rank's share of them. fingerprints: gets every tensor.

        Returns on rank 0 why it did not succeed, else "".
        """
        self._shares.keep()
        failure = self._join() if self._rank == 0 else ""
        for names in self._buckets:
            flat = self._shares.together(names)
            if flat is None:
                continue
            if fingerprints is not None:
                for name, tensor in self._split(names, flat):
                    fingerprints.add(name, tensor)
            failure = failure or self._give(flat)
        return failure

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """What was broadcast last, tensor by tensor, on rank 0; nothing elsewhere, but every rank must walk through."""
        for names in self._buckets:
            flat = self._shares.together(names, kept=True)
            if flat is not None:
                yield from self._split(names, flat)

    def close(self) -> None:
        """Leave the group, if there is one: members that wait for this rank get an error."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _join(self) -> str:
        if self._group is None:
            try:
                self._group = WeightGroup(**self._joining)
            except RuntimeError as error:
                self._joining = {}  # with it goes the store, and those who joined need not wait for the others
                return f"not all samplers joined the group: {error}"
        return ""

    def _give(self, flat: Tensor) -> str:
        assert self._group is not None
        try:
            self._group.broadcast(flat)
        except RuntimeError as error:
            self.close()
            return f"a broadcast failed: {error}"
        return ""

    def _split(self, names: list[str], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        shapes = [self._shares.shapes[name] for name in names]
        tensors = split(flat, names, [self._shares.dtype] * len(names), shapes)
        return ((name.removeprefix(self._prefix), tensor) for name, tensor in tensors.items())
