"""Ulysses: ranks that share a row, so that it may be longer than one of them could hold.

Outside of attention each rank of a group computes an equal, contiguous part of the row's tokens, with all heads; inside
it all tokens, with an equal part of the heads. Between the two, every rank exchanges tensors with every other. Nothing
changes for the parameters: a gradient is summed over all ranks as ever. Each rank computes the whole loss, and the
gradient flows back through the tokens that the rank scored itself.

Source: DeepSpeed Ulysses, arXiv:2309.14509; deepspeedai/DeepSpeed, deepspeed/sequence/layer.py.

Letters: T tokens of a row, N of them to score, S ranks of a group, H query heads, K key-value heads, D head width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional

from nanodag.errors import ConfigError
from nanodag.model.architecture import Architecture
from nanodag.model.attention import Attend
from nanodag.train.deepspeed_engine import start_ranks


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank computes of a row. token_ids, position_ids: (1, ceil(T / S)), filled up with zeros. places: which
    of the N tokens to score are its own; predictors: where in its part; targets: (1, len(places))."""

    token_ids: Tensor
    position_ids: Tensor
    places: Tensor
    predictors: Tensor
    targets: Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """The group of this rank: `size` neighbouring ranks, of which it is the one at `place`. number: of this group among
    num_groups. handle: the process group, None where the rank is alone."""

    size: int = 1
    place: int = 0
    number: int = 0
    num_groups: int = 1
    handle: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this rank counts for the group."""
        return self.place == 0

    def check(self, model: Architecture) -> None:
        """Raise ConfigError for a model whose heads cannot be shared out."""
        if model.num_heads % self.size or model.num_kv_heads % self.size:
            raise ConfigError(
                f"sequence_parallel {self.size} shares heads out over ranks, and the model has {model.num_heads} query "
                f"and {model.num_kv_heads} key-value heads; choose a number that divides both."
            )

    def share_of(self, token_ids: Tensor, position_ids: Tensor, predictors: Tensor, targets: Tensor) -> Share:
        """This rank's part of a row. token_ids, position_ids: (T,); predictors, targets: (N,)."""
        if self.size == 1:  # nothing is looked for, so a GPU need not be waited for
            every = torch.arange(len(targets), device=targets.device)
            return Share(token_ids[None], position_ids[None], every, predictors, targets[None])
        size = -(-len(token_ids) // self.size)
        start = self.place * size
        places = ((predictors >= start) & (predictors < start + size)).nonzero().squeeze(1)
        padding = (0, size * self.size - len(token_ids))
        tokens, positions = (
            functional.pad(ids, padding)[None, start : start + size] for ids in (token_ids, position_ids)
        )
        return Share(tokens, positions, places, predictors[places] - start, targets[None, places])

    def attention(self, attend: Attend, num_tokens: int) -> Attend:
        """An Attend of parts of a row, by one of the whole row of num_tokens."""
        if self.handle is None:
            return attend

        def of_parts(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            heads = [tensor[0].chunk(self.size, dim=1) for tensor in (query, key, value)]
            # (S, T / S, (H + 2 K) / S, D)
            blocks = torch.stack([torch.cat(parts, dim=1) for parts in zip(*heads, strict=True)])
            whole = _Exchange.apply(blocks, self.handle).flatten(0, 1)[:num_tokens]
            counts = [tensor.shape[2] // self.size for tensor in (query, key, value)]
            out = attend(*(part[None] for part in whole.split(counts, dim=1)))[0]  # (T, H / S, D)
            out = functional.pad(out, (0, 0, 0, 0, 0, query.shape[1] * self.size - num_tokens))
            head_parts = _Exchange.apply(out.unflatten(0, (self.size, -1)), self.handle)  # (S, T / S, H / S, D)
            return torch.cat(head_parts.unbind(), dim=1)[None]

        return of_parts

    def whole(self, own: Tensor, share: Share, num_tokens: int) -> Tensor:
        """What each rank found of the N tokens that it scored, put together: (N,) from (len(places),). A gradient flows
        into this rank's alone."""
        if self.handle is None:
            return own
        gathered = own.new_zeros(num_tokens).index_copy(0, share.places, own.detach())
        dist.all_reduce(gathered, group=self.handle)
        return gathered.index_copy(0, share.places, own)

    def of_first(self, values: Tensor) -> Tensor:
        """What the first rank of the group has, in place of this one's."""
        if self.handle is not None:
            dist.broadcast(values, group=self.handle, group_src=0)
        return values

    def counted(self, *values: float) -> list[float]:
        """What this rank adds to a sum over all ranks: its group's numbers, or zeros."""
        return [value if self.is_first else 0.0 for value in values]


ALONE = SequenceGroup()


def join(size: int, device: str) -> SequenceGroup:
    """The group of this rank, of `size` ranks. Every rank must call it; the ranks are started where they are not."""
    start_ranks(device)
    world_size = dist.get_world_size()
    number, place = divmod(dist.get_rank(), size)
    handle = None
    if size > 1:
        ranks = [list(range(start, start + size)) for start in range(0, world_size, size)]
        handle, _ = dist.new_subgroups_by_enumeration(ranks)
    return SequenceGroup(size, place, number, world_size // size, handle)


class _Exchange(torch.autograd.Function):
    """(S, ...): block i goes to rank i of the group, and what rank i sent comes in its place. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, blocks.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, d_received: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(d_received, ctx.group), None
