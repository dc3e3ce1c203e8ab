"""The trainer's half of the distributed weight sync: its rank 0 broadcasts the weights to the samplers, by buckets.

A sampler that dies or hangs ends a broadcast with an error; rank 0 then leaves the group and says so, the ranks go on
in step, and the controller gives the weights another way.
"""

from typing import Any

from torch import Tensor

from nanodag.rl.trainer.buckets import NOW, Buckets
from nanodag.sampler.fingerprints import Fingerprints
from nanodag.sampler.weight_group import WeightGroup, open_store


class Broadcaster:
    """One rank's part. timeout_s: most that the making of a group or one broadcast may take."""

    def __init__(self, buckets: Buckets, *, rank: int, timeout_s: float) -> None:
        self.buckets = buckets
        self._rank = rank
        self._timeout_s = timeout_s
        self._joining: dict[str, Any] = {}
        self._group: WeightGroup | None = None

    def open(self, name: str, size: int, *, address: str, backend: str) -> int:
        """Leave the group that there was, and listen for another's members on an address. Returns rank 0's port."""
        if self._rank > 0:
            return 0
        self.close()
        store = open_store(address, self._timeout_s)
        self._joining = {"store": store, "name": name, "size": size, "backend": backend}
        return store.port

    def join(self) -> str:
        """Wait for the members of the group that was opened. Returns on rank 0 why they did not come, else ""."""
        if self._rank > 0:
            return ""
        try:
            self._group = WeightGroup(**self._joining, rank=0, timeout_s=self._timeout_s)
        except RuntimeError as error:
            return f"not all samplers joined the group: {error}"
        finally:
            self._joining = {}  # with it goes the store, and those who joined need not wait for the others
        return ""

    def send(self, fingerprints: Fingerprints | None, which: str = NOW) -> str:
        """Broadcast weights. fingerprints: gets every tensor. which: as of `Buckets`.

        Returns on rank 0 why it did not succeed, else "".
        """
        self.buckets.begin(which)
        failure = ""
        for number in range(len(self.buckets)):
            flat = self.buckets.together(number, which)
            if flat is None:
                continue
            if fingerprints is not None:
                for name, tensor in self.buckets.named(number, flat):
                    fingerprints.add(name, tensor)
            failure = failure or self._give(flat)
        return failure

    def close(self) -> None:
        """Leave the group, if there is one: members that wait for this rank get an error."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _give(self, flat: Tensor) -> str:
        if self._group is None:
            return "there is no group"
        try:
            self._group.broadcast(flat.to(self._group.device))
        except RuntimeError as error:
            self.close()
            return f"a broadcast failed: {error}"
        return ""
