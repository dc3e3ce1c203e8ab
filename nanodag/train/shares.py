"""A model's weights as they lie spread over the ranks, brought together on rank 0 a bucket at a time.

Under ZeRO-3 a rank has an equal part of each parameter, the last one filled up; below, every rank has all of them. A
copy by `keep` stays as it is while training continues: a sampler that must be started again takes it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist


def in_buckets(names: Sequence[str], num_bytes: Mapping[str, int], largest: int) -> Iterator[list[str]]:
    """Names in their order, in runs of at most `largest` bytes; a larger tensor comes alone."""
    bucket: list[str] = []
    size = 0
    for name in names:
        if bucket and size + num_bytes[name] > largest:
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += num_bytes[name]
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
        device = self._own(names[0]).device
        shares = [(self._kept[name] if kept else self._own(name)).to(device) for name in names]
        if not self._is_spread or self._world == 1:
            wholes = [self._whole(name, [share]) for name, share in zip(names, shares, strict=True)]
            return wholes[0] if len(wholes) == 1 else torch.cat(wholes)
        mine = torch.cat(shares)
        gathered = [torch.empty_like(mine) for _ in range(self._world)] if self._rank == 0 else None
        dist.gather(mine, gathered, dst=0)
        if gathered is None:
            return None
        sizes = [share.numel() for share in shares]
        by_rank = [ranks.split(sizes) for ranks in gathered]
        return torch.cat([self._whole(name, [part[n] for part in by_rank]) for n, name in enumerate(names)])

    def _own(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        local = getattr(parameter, "ds_tensor") if self._is_spread else parameter  # noqa: B009 - DeepSpeed sets it
        return local.detach().reshape(-1)

    def _whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The bytes of a tensor whose parts the ranks have, without what fills up the last."""
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return whole.view(torch.uint8)[: self.num_bytes[name]]
