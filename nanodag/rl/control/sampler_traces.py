"""Traces of the samplers while they make a step's rollouts (`profile_steps`). No torch here."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from nanodag.engines.fleet import Fleet
from nanodag.engines.replica import Replica
from nanodag.errors import NanodagError
from nanodag.inference.client import SamplerClient

log = logging.getLogger(__name__)


@asynccontextmanager
async def traced_samplers(samplers: Fleet, folder: Path) -> AsyncIterator[None]:
    """Each sampler traces what it does inside, into a folder of its own below this one. A trace that fails, also
    because its sampler was lost, costs a warning."""

    async def start(replica: Replica, client: SamplerClient) -> None:
        own = folder / f"sampler-{replica.number}"
        own.mkdir(parents=True, exist_ok=True)
        await client.start_profile(own)

    try:
        await samplers.each(start, are_up=True)
    except NanodagError as error:
        log.warning("samplers are not traced for %s: %s", folder.name, error)
    yield
    try:
        await samplers.each(lambda replica, client: client.stop_profile(), are_up=True)
    except NanodagError as error:
        log.warning("no trace of a sampler for %s: %s", folder.name, error)
