"""The trainer's half of a weight sync without a folder: its ranks give the weights to the samplers, bucket by bucket,
through a process group or through shared memory.

All ranks do each of these together: every rank takes part in bringing a bucket together on rank 0, which so holds one
beside its own share, and has the replies that count. The ranks keep a copy of their shares of the weights that were
given last: a sampler that has to take them again later gets the same bytes. What is shared stays until the next bucket,
or until `release`: a sampler copies it while it answers. A sampler that dies or hangs ends a broadcast with an error;
rank 0 then leaves the group and says so, the ranks go on in step, and the controller gives the weights another way.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanodag.config.rl_sections import WeightsSection
from nanodag.inference.bound_store import nccl_version
from nanodag.inference.weight_bodies import largest_bucket
from nanodag.model.folder import read_tensors
from nanodag.model.lora import BETWEEN, merged, peft_name, read_adapter
from nanodag.sampler.fingerprints import Fingerprints
from nanodag.sampler.shared_tensors import share
from nanodag.sampler.weight_group import WeightGroup, open_store, split
from nanodag.train.shares import Shares, in_buckets

NOW, KEPT = "now", "kept"
"""Which weights: the trainer's own, those that it gave last; any other word is a folder."""


class WeightGiver:
    """One rank's part. prefix: of the parameters' names, before those that transformers gives. make_fingerprints: new
    ones, of the tensors that samplers must then hold.

    lora_scale: alpha over rank, of a policy with adapters. A bucket is gathered with its adapters, some hundredths of
    its size, and merged on rank 0 by the same code as where weights are written into a folder (nanodag.model.lora), so
    both ways give the same bits. Rank 0 holds the bucket twice then. With `lora_sync: adapter` adapters are given
    alone, by peft's names, to who merges them by that code; fingerprints are still of the merged tensors.
    """

    def __init__(
        self,
        shares: Shares,
        config: WeightsSection,
        *,
        rank: int,
        prefix: str,
        make_fingerprints: Callable[[], Fingerprints],
        lora_scale: float = 1.0,
    ) -> None:
        self._shares, self._rank, self._prefix, self._lora_scale = shares, rank, prefix, lora_scale
        self._parts: dict[str, list[str]] = {}  # of each parameter: its weight, then its adapters
        for name in shares.shapes:
            layer, between, _ = name.partition(BETWEEN)
            self._parts.setdefault(f"{layer}.weight" if between else name, []).append(name)
        self._num_bytes = {name: shares.num_bytes[parts[0]] for name, parts in self._parts.items()}
        self._gives_adapters, names = config.lora_sync == "adapter", list(self._parts)
        largest = config.sync_bucket_bytes or largest_bucket(sum(self._num_bytes.values()))
        self._merged_buckets = self._buckets = list(in_buckets(names, self._num_bytes, largest))
        if self._gives_adapters:
            names = [name for name in shares.shapes if peft_name(name) != name]
            self._parts |= {name: [name] for name in names}
            self._num_bytes |= {name: shares.num_bytes[name] for name in names}
            self._buckets = list(in_buckets(names, self._num_bytes, largest))
        self._timeout_s = config.sync_timeout_s
        self._make_fingerprints = make_fingerprints
        self._fingerprints: Fingerprints | None = None
        self._shared: Tensor | None = None
        self._joining: dict[str, Any] = {}
        self._group: WeightGroup | None = None

    def layout(self) -> dict[str, Any]:
        """`buckets`: the fields of a `weight_bodies.Bucket` each, in the order in which they are given; `lora_scale`
        of adapters alone, else None."""
        dtype = str(self._shares.dtype).removeprefix("torch.")
        buckets = [
            {"names": list(of), "dtypes": [dtype] * len(of), "shapes": [list(shape) for shape in of.values()]}
            for of in map(self._shapes, self._buckets)
        ]
        return {"buckets": buckets, "lora_scale": self._lora_scale if self._gives_adapters else None}

    def begin(self, which: str, *, fingerprint: bool) -> None:
        """Keep the trainer's own weights as they are now; to be called before the first bucket."""
        if which == NOW:
            self._shares.keep()
        self._fingerprints = self._make_fingerprints() if fingerprint and self._rank == 0 else None
        for name, tensor in self.tensors(merged=True) if fingerprint and self._gives_adapters else ():
            if self._fingerprints is not None:
                self._fingerprints.add(name, tensor)

    def _named(self, names: Sequence[str], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors in a bucket's bytes, by the names that samplers know; views."""
        shapes = self._shapes(names)
        return iter(split(flat, list(shapes), [self._shares.dtype] * len(shapes), list(shapes.values())).items())

    def tensors(self, *, kept: bool = False, merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The weights as they are now, or, kept, those given last, tensor by tensor, on rank 0; nothing elsewhere, but
        every rank must walk through. merged: all of them, also where adapters are given."""
        for names in self._merged_buckets if merged else self._buckets:
            if (flat := self._merged(names, kept=kept)) is not None:
                yield from self._named(names, flat)

    def open_group(self, name: str, size: int, *, address: str, backend: str) -> dict[str, Any]:
        """Leave the group that there was, and listen for another's members on an address; `port`: rank 0's."""
        if self._rank > 0:
            return {"port": 0}
        self.leave_group()
        store = open_store(address, self._timeout_s, nccl=nccl_version() if backend == "nccl" else "")
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

    def leave_group(self) -> dict[str, Any]:
        """Leave the group, if there is one: members that wait for this rank get an error."""
        if self._group is not None:
            self._group.close()
            self._group = None
        return {}

    def broadcast(self, *, which: str, fingerprint: bool) -> dict[str, Any]:
        """`failure`: why not all were sent, else ""; `fingerprints` by name. which: weights."""
        self.begin(which, fingerprint=fingerprint)
        failure = ""
        for number in range(len(self._buckets)):
            if (flat := self._bucket(number, which)) is not None:
                failure = failure or self._send(flat)
        return {"failure": failure, "fingerprints": {} if self._fingerprints is None else self._fingerprints.all()}

    def share(self, number: int, *, counts: Sequence[int], fingerprint: bool) -> dict[str, Any]:
        """`handles` of a bucket of the weights as they are now, as many as `counts` has for this rank (none where it is
        shorter); `failure`: why there are none, else ""; with the last bucket `fingerprints` of them all, on rank 0. To
        be called for all buckets in their order."""
        self.release()
        if number == 0:
            self.begin(NOW, fingerprint=fingerprint)
        reply: dict[str, Any] = {"handles": [], "failure": "", "fingerprints": {}}
        if (flat := self._bucket(number, NOW, everywhere=any(counts[1:]))) is None:
            return reply
        if self._fingerprints is not None and number + 1 == len(self._buckets):
            reply["fingerprints"] = self._fingerprints.all()
        count = counts[self._rank] if self._rank < len(counts) else 0
        try:
            shapes = self._shapes(self._buckets[number])
            self._shared, reply["handles"] = share(flat, shapes, self._shares.dtype, count)
        except RuntimeError as error:
            reply["failure"] = f"a bucket could not be shared: {error}"
        return reply

    def release(self) -> None:
        """Let go of what is shared."""
        self._shared = None

    def close(self) -> None:
        self.release()
        self.leave_group()

    def _shapes(self, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        return {peft_name(name.removeprefix(self._prefix)): self._shares.shapes[self._parts[name][0]] for name in names}

    @torch.no_grad()
    def _merged(self, names: Sequence[str], *, kept: bool = False, everywhere: bool = False) -> Tensor | None:
        """Bytes of these parameters on rank 0, or, of those as they are now, everywhere; adapters merged."""
        parts = [part for name in names for part in self._parts[name]]
        flat = self._shares.everywhere(parts) if everywhere else self._shares.together(parts, kept=kept)
        if flat is None or len(parts) == len(names):
            return flat
        dtypes, shapes = [self._shares.dtype] * len(parts), [self._shares.shapes[part] for part in parts]
        whole = torch.empty(sum(self._num_bytes[name] for name in names), dtype=torch.uint8, device=flat.device)
        begin = 0
        for name, tensor in merged(split(flat, parts, dtypes, shapes).items(), scale=self._lora_scale):
            end = begin + self._num_bytes[name]
            whole[begin:end] = tensor.contiguous().reshape(-1).view(torch.uint8)
            begin = end
        return whole

    def _bucket(self, number: int, which: str, *, everywhere: bool = False) -> Tensor | None:
        """A bucket's bytes on rank 0, (num_bytes,) uint8; None elsewhere. Every rank must call it. everywhere: on every
        rank, of the trainer's own. Fingerprints of its tensors are made where they were asked for."""
        flat = None
        if which in (NOW, KEPT):
            flat = self._merged(self._buckets[number], kept=which == KEPT, everywhere=everywhere)
        elif self._rank == 0:
            folder, names = Path(which), list(self._shapes(self._buckets[number]))
            held = read_adapter(folder)[0] if self._gives_adapters else {}
            tensors = [held[name] for name in names] if held else read_tensors(folder, names)
            flat = torch.cat([tensor.to(self._shares.dtype).reshape(-1).view(torch.uint8) for tensor in tensors])
        if flat is not None and self._fingerprints is not None and not self._gives_adapters:
            for name, tensor in self._named(self._buckets[number], flat):
                self._fingerprints.add(name, tensor)
        return flat

    def _send(self, flat: Tensor) -> str:
        """Broadcast a bucket; returns why that failed, else ""."""
        if self._group is None:
            return "there is no group"
        try:
            self._group.broadcast(flat.to(self._group.device))
        except RuntimeError as error:
            self.leave_group()
            return f"a broadcast failed: {error}"
        return ""
