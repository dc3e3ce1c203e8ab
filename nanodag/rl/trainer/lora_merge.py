"""The weights of a policy with adapters, merged on rank 0 as they are brought together.

A bucket is gathered with its adapters, some hundredths of its size, and merged there by the same code as where weights
are written into a folder (nanodag.model.lora), so both ways give the same bits. Rank 0 holds the bucket twice then.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanodag.model.lora import BETWEEN, merged
from nanodag.sampler.weight_group import split
from nanodag.train.shares import Shares


class MergedShares:
    """Counterpart of `Shares` for a model with adapters. scale: alpha over rank."""

    def __init__(self, shares: Shares, *, scale: float) -> None:
        self._shares, self._scale = shares, scale
        self.dtype = shares.dtype
        self._parts: dict[str, list[str]] = {}
        for name in shares.shapes:
            layer, between, _ = name.partition(BETWEEN)
            self._parts.setdefault(f"{layer}.weight" if between else name, []).append(name)
        # The first part is the weight that the adapters belong to.
        self.shapes = {name: shares.shapes[parts[0]] for name, parts in self._parts.items()}
        self.num_bytes = {name: shares.num_bytes[parts[0]] for name, parts in self._parts.items()}

    def keep(self) -> None:
        """Keep the shares; adapters are kept by themselves."""
        self._shares.keep()

    @torch.no_grad()
    def together(self, names: Sequence[str], *, kept: bool = False) -> Tensor | None:
        """Bytes of the merged tensors, brought together as by `Shares`."""
        parts = [part for name in names for part in self._parts[name]]
        flat = self._shares.together(parts, kept=kept)
        if flat is None or len(parts) == len(names):
            return flat
        pairs = split(flat, parts, [self.dtype] * len(parts), [self._shares.shapes[part] for part in parts])
        whole = torch.empty(sum(self.num_bytes[name] for name in names), dtype=torch.uint8, device=flat.device)
        begin = 0
        for name, tensor in merged(pairs.items(), scale=self._scale):
            end = begin + self.num_bytes[name]
            whole[begin:end] = tensor.contiguous().reshape(-1).view(torch.uint8)
            begin = end
        return whole
