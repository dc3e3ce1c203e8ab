"""The trainer's half of a weight sync without a folder: its ranks give the weights to the samplers, bucket by bucket.

    layout                             names, dtypes and shapes of the buckets
    open_group, join_group, broadcast  through a process group
    share                              through shared memory: handles that a sampler opens
    kept                               the weights that were given last, for a folder

All ranks do each of these together: every rank takes part in bringing a bucket together on rank 0, which so holds one
beside its own share, and has the replies that count. The ranks keep a copy of their shares of the weights that were
given last: a sampler that has to take them again later gets the same bytes. What is shared stays until the next bucket,
or until `release`: a sampler copies it while it answers. A sampler that dies or hangs ends a broadcast with an error;
rank 0 then leaves the group and says so, the ranks go on in step, and the controller gives the weights another way.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanodag.model.folder import read_tensors
from nanodag.rl.trainer.lora_merge import MergedShares
from nanodag.sampler.fingerprints import Fingerprints
from nanodag.sampler.shared_tensors import share
from nanodag.sampler.weight_group import WeightGroup, open_store, split
from nanodag.train.shares import Shares, in_buckets

NOW, KEPT = "now", "kept"
"""Which weights: the trainer's own, those that it gave last; any other word is a folder."""


class Buckets:
    """One rank's part. prefix: of the parameters' names, before those that transformers gives. bucket_bytes: most that
    is brought together at once, unless one tensor is larger."""

    def __init__(self, shares: Shares | MergedShares, *, rank: int, prefix: str, bucket_bytes: int) -> None:
        self._shares, self.dtype = shares, shares.dtype
        self._rank, self._prefix = rank, prefix
        self._buckets = list(in_buckets(list(shares.shapes), shares.num_bytes, bucket_bytes))

    def __len__(self) -> int:
        return len(self._buckets)

    def layout(self) -> dict[str, Any]:
        """`buckets`: the fields of a `weight_bodies.Bucket` each, in the order in which they are given."""
        dtype = str(self.dtype).removeprefix("torch.")
        shapes = (self.shapes(number) for number in range(len(self)))
        buckets = [
            {"names": list(of), "dtypes": [dtype] * len(of), "shapes": [list(shape) for shape in of.values()]}
            for of in shapes
        ]
        return {"buckets": buckets}

    def shapes(self, number: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in a bucket, by the names that transformers gives."""
        return {name.removeprefix(self._prefix): self._shares.shapes[name] for name in self._buckets[number]}

    def begin(self, which: str) -> None:
        """Keep the trainer's own weights as they are now; to be called before the first bucket."""
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
        """The weights given last, tensor by tensor, on rank 0; nothing elsewhere, but every rank must walk through."""
        for number in range(len(self)):
            flat = self.together(number, KEPT)
            if flat is not None:
                yield from self.named(number, flat)


class WeightGiver(Buckets):
    """One rank's part, which gives its buckets. timeout_s: most that the making of a group or one broadcast may take.
    make_fingerprints: new ones, of the tensors that samplers must then hold."""

    def __init__(
        self,
        shares: Shares | MergedShares,
        *,
        rank: int,
        prefix: str,
        bucket_bytes: int,
        timeout_s: float,
        make_fingerprints: Callable[[], Fingerprints],
    ) -> None:
        super().__init__(shares, rank=rank, prefix=prefix, bucket_bytes=bucket_bytes)
        self._timeout_s = timeout_s
        self._make_fingerprints = make_fingerprints
        self._fingerprints: Fingerprints | None = None
        self._shared: Tensor | None = None
        self._joining: dict[str, Any] = {}
        self._group: WeightGroup | None = None

    def open_group(self, name: str, size: int, *, address: str, backend: str) -> dict[str, Any]:
        """Leave the group that there was, and listen for another's members on an address; `port`: rank 0's."""
        if self._rank > 0:
            return {"port": 0}
        self._leave_group()
        store = open_store(address, self._timeout_s)
        self._joining = {"store": store, "name": name, "size": size, "backend": backend}
        return {"port": store.port}

    def join_group(self) -> dict[str, Any]:
        """Wait for the members of the group that was opened; `failure`: why they did not come, else ""."""
        failure = ""
        if self._rank == 0:
            try:
                self._group = WeightGroup(**self._joining, rank=0, timeout_s=self._timeout_s)
            except RuntimeError as error:
                failure = f"not all samplers joined the group: {error}"
            finally:
                self._joining = {}  # with it goes the store, and those who joined need not wait for the others
        return {"failure": failure}

    def broadcast(self, *, which: str, fingerprint: bool) -> dict[str, Any]:
        """`failure`: why not all were sent, else ""; `fingerprints` by name. which: as of `together`."""
        self._begin(which, fingerprint=fingerprint)
        failure = ""
        for number in range(len(self)):
            if (flat := self._bucket(number, which)) is not None:
                failure = failure or self._send(flat)
        return {"failure": failure, "fingerprints": {} if self._fingerprints is None else self._fingerprints.all()}

    def share(self, number: int, *, which: str, count: int, fingerprint: bool) -> dict[str, Any]:
        """`handles` of a bucket, so many; `failure`: why there are none, else ""; with the last bucket `fingerprints`
        of them all. To be called for all buckets in their order. which: as of `together`."""
        self.release()
        if number == 0:
            self._begin(which, fingerprint=fingerprint)
        reply: dict[str, Any] = {"handles": [], "failure": "", "fingerprints": {}}
        if (flat := self._bucket(number, which)) is None:
            return reply
        if self._fingerprints is not None and number + 1 == len(self):
            reply["fingerprints"] = self._fingerprints.all()
        try:
            self._shared, reply["handles"] = share(flat, self.shapes(number), self.dtype, count)
        except RuntimeError as error:
            reply["failure"] = f"a bucket could not be shared: {error}"
        return reply

    def release(self) -> None:
        """Let go of what is shared."""
        self._shared = None

    def close(self) -> None:
        self.release()
        self._leave_group()

    def _begin(self, which: str, *, fingerprint: bool) -> None:
        self.begin(which)
        self._fingerprints = self._make_fingerprints() if fingerprint and self._rank == 0 else None

    def _bucket(self, number: int, which: str) -> Tensor | None:
        """See `together`; the bucket's tensors are fingerprinted where that was asked for."""
        flat = self.together(number, which)
        if flat is not None and self._fingerprints is not None:
            for name, tensor in self.named(number, flat):
                self._fingerprints.add(name, tensor)
        return flat

    def _send(self, flat: Tensor) -> str:
        """Broadcast a bucket; returns why that failed, else ""."""
        if self._group is None:
            return "there is no group"
        try:
            self._group.broadcast(flat.to(self._group.device))
        except RuntimeError as error:
            self._leave_group()
            return f"a broadcast failed: {error}"
        return ""

    def _leave_group(self) -> None:
        """Leave the group, if there is one: members that wait for this rank get an error."""
        if self._group is not None:
            self._group.close()
            self._group = None
