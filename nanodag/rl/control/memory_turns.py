"""Memory of a device that trainer and samplers have in turns (`placement: shared`). No torch here.

    samplers' turn    weights and cache                              trainer: all in host memory
    to_trainer        samplers release weights and cache, then the trainer takes its memory back
    trainer's turn    weights, states, activations                   samplers: nothing
    before_sync       the trainer's states go to the host, then the samplers take memory for weights
    (the weight sync: both sides have weights)
    after_sync        the trainer's weights go to the host, then the samplers take memory for their cache

Who gives does so before the other takes. A sampler that dies is started again with all of its memory. It gives that up
when the trainer's turn comes; one that dies in the trainer's turn is started when that has ended.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from nanodag.engines.fleet import Fleet
from nanodag.engines.replica import NO_FOLDER, Replica
from nanodag.errors import SamplerError
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import MemoryTag
from nanodag.rl.sync.weight_sync import Ask

MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")


class Lending:
    """The turns of one stage; the samplers begin. ask: of the trainer's ranks. is_lent: False if both keep theirs."""

    def __init__(self, samplers: Fleet, ask: Ask, *, is_lent: bool = True) -> None:
        self._samplers, self._ask, self._is_lent = samplers, ask, is_lent
        self._is_trainers = False
        self._values: dict[str, int] = {}

    async def to_trainer(self) -> None:
        """Give the memory to the trainer, unless it has it."""
        if self._is_trainers or not self._is_lent:
            return
        self._is_trainers = True  # whatever follows fails: the samplers may lack theirs
        await self._samplers.each(_release)
        self._note("sampler", await held_memory(self._samplers))
        await self._ask("take_back")

    @asynccontextmanager
    async def for_sync(self) -> AsyncIterator[None]:
        """Inside, both sides have weights; after it the samplers have all."""
        if not self._is_trainers:
            yield
            return
        await self._ask("lend", what="states")
        await self._samplers.each(partial(_take, ["weights"]))
        yield
        self._note("trainer", await self._ask("lend", what="weights"))
        await self._samplers.each(partial(_take, ["kv_cache"]))
        self._is_trainers = False

    def taken(self) -> dict[str, int]:
        """Metrics since this was called last: the most bytes that a rank, and a sampler, held in the other's turn."""
        values, self._values = self._values, {}
        return values

    def _note(self, side: str, held: Sequence[Mapping[str, Any]]) -> None:
        if numbers := [int(each["bytes"]) for each in held if "bytes" in each]:
            self._values[f"{side}_resting_bytes"] = max(numbers)


async def held_memory(samplers: Fleet) -> list[dict[str, int]]:
    """Bytes that the samplers which are up say they hold (`SamplerClient.memory`); none of one that does not answer."""
    calls = [replica.client.memory() for replica in samplers.replicas if replica.is_up]
    replies = await asyncio.gather(*calls, return_exceptions=True)
    for error in replies:
        if isinstance(error, BaseException) and not isinstance(error, SamplerError):
            raise error
    return [each for each in replies if isinstance(each, dict)]


async def _release(replica: Replica, client: SamplerClient) -> None:
    """Have a sampler give its memory back; nothing may be in flight. What was in it is lost."""
    tags = [tag for tag in MEMORY_TAGS if tag not in replica.released]
    replica.watch.may_generate = False
    if tags:
        await client.release_memory(tags)
    replica.released.update(tags)


async def _take(tags: Sequence[MemoryTag], replica: Replica, client: SamplerClient) -> None:
    """Have a sampler take memory again that it gave back; one that was started meanwhile has it."""
    if released := [tag for tag in tags if tag in replica.released]:
        await client.resume_memory(released)
    if "weights" in released:
        replica.folder = NO_FOLDER
    replica.released.difference_update(released)
    replica.watch.may_generate = not replica.released
