"""What a rank of the trainer does when the controller gives its weights to the samplers, without a folder.

    layout                             what is given: buckets, with names, dtypes and shapes
    open_group, join_group, broadcast  through a process group (nanodag.rl.trainer.broadcast)
    share                              through shared memory, bucket by bucket: handles that a sampler opens
    kept                               what was given last, for a folder

All ranks do each of these together; rank 0 has the replies that count. What is shared stays until the next bucket, or
until `release`: a sampler copies it while it answers.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from nanodag.rl.trainer.broadcast import Broadcaster
from nanodag.rl.trainer.buckets import Buckets, WeightSource
from nanodag.sampler.fingerprints import Fingerprints
from nanodag.sampler.shared_tensors import share


class WeightGiver:
    """One rank's part; `prefix`, `bucket_bytes` as of `Buckets`, `timeout_s` as of `Broadcaster`. make_fingerprints:
    new ones, of the tensors that samplers must then hold."""

    def __init__(
        self,
        shares: WeightSource,
        *,
        rank: int,
        prefix: str,
        bucket_bytes: int,
        timeout_s: float,
        make_fingerprints: Callable[[], Fingerprints],
    ) -> None:
        self.buckets = Buckets(shares, rank=rank, prefix=prefix, bucket_bytes=bucket_bytes)
        self.broadcaster = Broadcaster(self.buckets, rank=rank, timeout_s=timeout_s)
        self._rank = rank
        self._make_fingerprints = make_fingerprints
        self._fingerprints: Fingerprints | None = None
        self._shared: Tensor | None = None

    def layout(self) -> dict[str, Any]:
        """`buckets`: the fields of a `weight_bodies.Bucket` each."""
        return {"buckets": self.buckets.layout()}

    def open_group(self, name: str, size: int, *, address: str, backend: str) -> dict[str, Any]:
        """`port`: where rank 0 listens for the members of a group."""
        return {"port": self.broadcaster.open(name, size, address=address, backend=backend)}

    def join_group(self) -> dict[str, Any]:
        """`failure`: why the members did not come, else ""."""
        return {"failure": self.broadcaster.join()}

    def broadcast(self, *, which: str, fingerprint: bool) -> dict[str, Any]:
        """`failure`: why not all were sent, else ""; `fingerprints` by name. which: as of `Buckets`."""
        found = self._make_fingerprints() if fingerprint and self._rank == 0 else None
        failure = self.broadcaster.send(found, which)
        return {"failure": failure, "fingerprints": {} if found is None else found.all()}

    def share(self, number: int, *, which: str, count: int, fingerprint: bool) -> dict[str, Any]:
        """`handles` of a bucket, so many; `failure`: why there are none, else ""; with the last bucket `fingerprints`
        of them all. To be called for all buckets in their order. which: as of `Buckets`."""
        self.release()
        if number == 0:
            self.buckets.begin(which)
            self._fingerprints = self._make_fingerprints() if fingerprint and self._rank == 0 else None
        reply: dict[str, Any] = {"handles": [], "failure": "", "fingerprints": {}}
        flat = self.buckets.together(number, which)
        if flat is None:
            return reply
        if self._fingerprints is not None:
            for name, tensor in self.buckets.named(number, flat):
                self._fingerprints.add(name, tensor)
            if number + 1 == len(self.buckets):
                reply["fingerprints"] = self._fingerprints.all()
        try:
            self._shared, found = share(flat, self.buckets.shapes(number), self.buckets.dtype, count)
        except RuntimeError as error:
            return reply | {"failure": f"a bucket could not be shared: {error}"}
        return reply | {"handles": found}

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """As of `Buckets`."""
        return self.buckets.kept()

    def release(self) -> None:
        """Let go of what is shared."""
        self._shared = None

    def close(self) -> None:
        """Leave the group, and let go of what is shared."""
        self.release()
        self.broadcaster.close()
