"""A model's weights as they lie spread over the ranks, brought together on rank 0 a bucket at a time.

Under ZeRO-3 a rank has an equal part of each parameter, the last one filled up; below, every rank has all of them. A
copy by `keep` stays as it is while training continues: a sampler that must be started again takes it.

Rank 0 takes the ranks' parts one after the other and puts each in its place. So it holds one bucket and one rank's part
of it, and never all parts beside the whole.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist


def in_buckets(names: Sequence[str], sizes: Mapping[str, int], largest: int) -> Iterator[list[str]]:
    """Names in their order, in runs of at most `largest` bytes or elements; a larger tensor comes alone."""
    bucket: list[str] = []
    size = 0
    for name in names:
        if bucket and size + sizes[name] > largest:
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += sizes[name]
    if bucket:
        yield bucket


class Shares:
    """This rank's. shapes: of the whole parameters. is_spread: ZeRO-3. Source: deepspeed 0.19.8,
    runtime/zero/partition_parameters.py (ds_tensor)."""

    def __init__(
        self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype, is_spread: bool
    ) -> None:
        self.shapes, self.dtype = shapes, dtype
        self.num_bytes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
        self._parameters = dict(model.named_parameters())
        self._is_spread = is_spread
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        # Parameters that DeepSpeed keeps on the host still meet on the GPU, which is all that NCCL knows.
        self._device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Copy this rank's part of the weights as they are now, in place of the copy before."""
        if not self._is_spread and self._rank > 0:
            return
        for name in self._parameters:
            share = self._own(name)
            if name in self._kept:
                self._kept[name].copy_(share)
            else:
                self._kept[name] = share.to("cpu", copy=True)

    @torch.no_grad()
    def together(self, names: Sequence[str], *, kept: bool = False) -> Tensor | None:
        """On rank 0 the bytes of these whole tensors, one after the other, (num_bytes,) uint8; None elsewhere. Every
        rank must call it. kept: as they were at the last `keep`."""
        if not self._is_spread and self._rank > 0:
            return None
        shares = [(self._kept[name] if kept else self._own(name)).to(self._device) for name in names]
        if not self._is_spread or self._world == 1:
            wholes = [share.view(torch.uint8)[: self.num_bytes[n]] for n, share in zip(names, shares, strict=True)]
            return wholes[0] if len(wholes) == 1 else torch.cat(wholes)
        if self._rank > 0:
            _exchange(dist.isend, torch.cat(shares), 0)
            return None
        whole = self._room(names)
        self._place(whole, names, shares, rank=0)
        sizes = [share.numel() for share in shares]
        theirs = torch.empty(sum(sizes), dtype=self.dtype, device=self._device)
        for rank in range(1, self._world):
            _exchange(dist.irecv, theirs, rank)
            self._place(whole, names, theirs.split(sizes), rank=rank)
        return whole

    @torch.no_grad()
    def everywhere(self, names: Sequence[str]) -> Tensor:
        """On every rank what `together` has on rank 0, of the weights as they are now. Every rank must call it; each
        holds all ranks' parts beside the whole."""
        shares = [self._own(name).to(self._device).view(torch.uint8) for name in names]
        if not self._is_spread or self._world == 1:
            return torch.cat([share[: self.num_bytes[name]] for name, share in zip(names, shares, strict=True)])
        own, whole = torch.cat(shares), self._room(names)
        parts = torch.empty(self._world * len(own), dtype=torch.uint8, device=self._device)
        dist.all_gather_into_tensor(parts, own)
        for rank, part in enumerate(parts.chunk(self._world)):
            self._place(whole, names, part.split([len(share) for share in shares]), rank=rank)
        return whole

    def _room(self, names: Sequence[str]) -> Tensor:
        return torch.empty(sum(self.num_bytes[name] for name in names), dtype=torch.uint8, device=self._device)

    def _place(self, whole: Tensor, names: Sequence[str], parts: Sequence[Tensor], *, rank: int) -> None:
        """Copy a rank's parts of some tensors to where they belong, without what fills up the last."""
        begin = 0
        for name, part in zip(names, parts, strict=True):
            at = rank * part.nbytes
            target = whole[begin : begin + self.num_bytes[name]][at : at + part.nbytes]
            target.copy_(part.view(torch.uint8)[: len(target)])
            begin += self.num_bytes[name]

    def _own(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        local = getattr(parameter, "ds_tensor") if self._is_spread else parameter  # noqa: B009 - DeepSpeed sets it
        return local.detach().reshape(-1)


def _exchange(operation: Callable[..., Any], tensor: Tensor, peer: int) -> None:
    """Send to a rank or receive from it, as part of a batch: NCCL would make a communicator for each pair else."""
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
        work.wait()
