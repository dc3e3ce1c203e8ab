"""Ulysses: ranks that share a row, so that it may be longer than one of them could hold.

Outside of attention each rank of a group computes an equal, contiguous part of the row's tokens, with all heads; inside
it all tokens, with an equal part of the heads. Between the two, every rank exchanges tensors with every other. Nothing
changes for the parameters: a gradient is summed over all ranks as ever. Each rank computes the whole loss, and the
gradient flows back through the tokens that the rank scored itself.

Source: DeepSpeed Ulysses, arXiv:2309.14509; deepspeedai/DeepSpeed, deepspeed/sequence/layer.py.

Letters: T tokens of a row, N of them to score, S ranks of a group, H query heads, K key-value heads, D head width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nanodag.errors import ConfigError
from nanodag.model.architecture import Architecture
from nanodag.model.attention import Attend
from nanodag.train.deepspeed_engine import start_ranks


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a row. token_ids, position_ids: (1, ceil(T / S)), filled up with zeros. places: which
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
        """True on the rank that counts for the group."""
        return self.place == 0

    def check(self, model: Architecture) -> None:
        """Raise ConfigError for a model whose heads cannot be shared out."""
        if self.size > 1 and model.model_code != "own":
            raise ConfigError(
                f"sequence_parallel {self.size} shares out rows in our own decoder, and model_code {model.model_code} "
                f"computes this {model.model_type} model; set it to 1."
            )
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

    def part(self, rows: np.ndarray) -> np.ndarray:
        """This rank's part of rows (B, T) that lie one after the other: (1, B * T / S); where it is alone, the rows."""
        return rows if self.size == 1 else rows.reshape(self.size, 1, -1)[self.place]

    def attention(self, attend: Attend, num_tokens: int) -> Attend:
        """An Attend of parts of a row, by one of the whole row of num_tokens."""
        if self.handle is None:
            return attend

        exchange = _Exchange(self.handle, self.size)

        def of_parts(query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
            whole = _ToHeads.apply(exchange, query[0], key[0], value[0])[:num_tokens]
            counts = [tensor.shape[2] // self.size for tensor in (query, key, value)]
            query_part, key_part, value_part = (part[None] for part in whole.split(counts, dim=1))
            out = attend(query_part, key_part, value_part, window)[0]  # (T, H / S, D)
            if padding := query.shape[1] * self.size - num_tokens:  # pad copies in any case
                out = functional.pad(out, (0, 0, 0, 0, 0, padding))
            return _ToTokens.apply(exchange, out)[None]

        return of_parts

    def whole(self, own: Tensor, share: Share, num_tokens: int) -> Tensor:
        """Values of the N tokens, put together from the ranks that scored them: (N,) from (len(places),). A gradient
        flows into this rank's alone."""
        if self.handle is None:
            return own
        gathered = own.new_zeros(num_tokens).index_copy(0, share.places, own.detach())
        dist.all_reduce(gathered, group=self.handle)
        return gathered.index_copy(0, share.places, own)

    def of_first(self, values: Tensor) -> Tensor:
        """Values of the first rank of the group, in place of this one's."""
        if self.handle is not None:
            dist.broadcast(values, group=self.handle, group_src=0)
        return values

    def counted(self, *values: float) -> list[float]:
        """This rank's terms of a sum over all ranks: its group's numbers, or zeros."""
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


class _Exchange:
    """Between all heads of a rank's own tokens and its own heads of all tokens, for the layers of one row.

    What is sent, or received to be laid out anew, lies in one tensor that all of them use: one for each layer left as
    much memory between the tensors that are kept, which nothing else filled.
    """

    def __init__(self, group: Any, size: int) -> None:
        self._group, self.size = group, size
        self._buffer: Tensor | None = None

    def to_heads(self, parts: Sequence[Tensor]) -> Tensor:
        """(T / S, n, D) each -> (T, sum of n / S, D)."""
        heads = [part.unflatten(1, (self.size, -1)).transpose(0, 1) for part in parts]
        sent = self._blocks(parts[0], sum(part.shape[2] for part in heads))
        torch.cat(heads, dim=2, out=sent)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received.flatten(0, 1)

    def to_tokens(self, whole: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The way back: (T, sum of n / S, D) -> (T / S, n, D) each, n of counts."""
        received = self._blocks(whole[: len(whole) // self.size], whole.shape[1])
        dist.all_to_all_single(received, whole.contiguous().view(received.shape), group=self._group)
        blocks = received.split([count // self.size for count in counts], dim=2)
        return [torch.cat(block.unbind(), dim=1) for block in blocks]

    def _blocks(self, like: Tensor, num_heads: int) -> Tensor:
        """(S, T / S, num_heads, D) of the buffer, of the dtype of a tensor (T / S, any, D)."""
        shape = (self.size, len(like), num_heads, like.shape[2])
        count = math.prod(shape)
        if self._buffer is None or self._buffer.numel() < count:
            self._buffer = like.new_empty(count)
        return self._buffer[:count].view(shape)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *parts: Tensor) -> Tensor:
        ctx.exchange, ctx.counts = exchange, [part.shape[1] for part in parts]
        return exchange.to_heads(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_whole: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.exchange.to_tokens(d_whole, ctx.counts)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, whole: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_tokens(whole, [whole.shape[1] * exchange.size])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_parts: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.to_heads([d_parts])
