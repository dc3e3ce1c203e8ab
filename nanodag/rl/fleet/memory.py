"""Memory of the samplers' devices: given back, taken again, counted. No torch here."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nanodag.errors import SamplerError
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import MemoryTag
from nanodag.rl.fleet.replica import Replica
from nanodag.rl.fleet.samplers import Samplers

MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
NO_WEIGHTS = Path()
"""The folder of weights that a sampler lost with its memory."""


async def release_memory(samplers: Samplers) -> None:
    """Have every sampler give its memory back; nothing may be in flight. What was in it is lost."""
    await samplers.each(_release)


async def resume_memory(samplers: Samplers, tags: Sequence[MemoryTag]) -> None:
    """Have every sampler take memory again that it gave back; one that was started meanwhile has it."""
    await samplers.each(partial(_take, tags))


async def held_memory(samplers: Samplers) -> list[dict[str, int]]:
    """What those that are up say that they hold (`SamplerClient.memory`). Who does not answer is met by others."""
    asked = [replica.client.memory() for replica in samplers.replicas if replica.is_up]
    found = await asyncio.gather(*asked, return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException) and not isinstance(error, SamplerError):
            raise error
    return [each for each in found if isinstance(each, dict)]


async def _release(replica: Replica, client: SamplerClient) -> None:
    tags = [tag for tag in MEMORY_TAGS if tag not in replica.released]
    replica.watch.may_generate = False
    if tags:
        await client.release_memory(tags)
    replica.released.update(tags)


async def _take(tags: Sequence[MemoryTag], replica: Replica, client: SamplerClient) -> None:
    if given := [tag for tag in tags if tag in replica.released]:
        await client.resume_memory(given)
    if "weights" in given:
        replica.folder = NO_WEIGHTS
    replica.released.difference_update(given)
    replica.watch.may_generate = not replica.released
