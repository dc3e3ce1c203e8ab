"""Gives the samplers the trainer's weights, and makes sure that they have them. No torch here.

Two halves: `publish` is the trainer's, `load` the samplers'; between them the samplers may still be busy with older
weights. The first weights and every `sync_check_every`th after them are verified: the trainer fingerprints every tensor
that it gives away, each sampler every tensor that it then holds (nanodag/sampler/fingerprints.py), and a tensor that
differs ends the stage by its name.

Two ways; the other one is nanodag.rl.fleet.broadcast_sync. disk: rank 0 writes a Hugging Face directory, parameters
gathered in buckets, and the samplers read it. It must be kept until the next weights are loaded, because a sampler that
dies is started again with it.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from nanodag.errors import SamplerError
from nanodag.rl.fleet.samplers import Samplers

log = logging.getLogger(__name__)

MAX_NAMED = 5

Ask = Callable[..., Awaitable[list[dict[str, Any]]]]
"""ask("export", folder=...): has every rank of the trainer do something; their replies, by rank."""


class WeightSync(Protocol):
    """One way for weights to get from the trainer to the samplers."""

    keeps_trainer: bool
    """The trainer may train no further before the samplers have loaded what it published."""

    async def publish(self, folder: Path, version: int) -> None:
        """The trainer's half: its weights, of this version, are ready to be loaded. folder: theirs alone."""
        ...

    async def load(self, folder: Path, version: int) -> None:
        """The samplers' half: when it returns, every sampler samples with the weights that were published so.

        Raises SamplerError when one does not hold them.
        """
        ...

    async def write(self, folder: Path) -> None:
        """Have the folder of what was loaded last exist."""
        ...


class DiskSync:
    """Through a folder. check_every: the first weights and every one of that number are verified, 0 for none."""

    keeps_trainer = False

    def __init__(self, samplers: Samplers, ask: Ask, *, check_every: int) -> None:
        self._samplers = samplers
        self._ask = ask
        self._check_every = check_every
        self._num_published = 0
        self._fingerprints: dict[int, Mapping[str, str]] = {}

    async def publish(self, folder: Path, version: int) -> None:
        """Have the trainer write its weights."""
        is_checked = self._check_every > 0 and self._num_published % self._check_every == 0
        self._num_published += 1
        began = time.monotonic()
        replies = await self._ask("export", folder=str(folder), fingerprint=is_checked)
        if is_checked:
            self._fingerprints[version] = replies[0]["fingerprints"]
        log.info("weights %d: written in %.3f s", version, time.monotonic() - began)

    async def load(self, folder: Path, version: int) -> None:
        """Have the samplers read them, and see that they did."""
        began = time.monotonic()
        await self._samplers.update_weights_from_disk(str(folder), version)
        await check_versions(self._samplers, version)
        loaded = time.monotonic()
        expected = self._fingerprints.pop(version, {})
        if expected:
            await check_weights(self._samplers, version, expected)
        checked = f", {len(expected)} tensors verified in {time.monotonic() - loaded:.3f} s" if expected else ""
        log.info("weights %d: loaded in %.3f s%s", version, loaded - began, checked)

    async def write(self, folder: Path) -> None:
        """It was written when they were published."""


async def check_versions(samplers: Samplers, version: int) -> None:
    """Raise SamplerError when a sampler does not say that it has these weights."""
    found = await samplers.versions()
    if set(found) != {str(version)}:
        raise SamplerError(f"The samplers say that they have weights {found} after they were given {version}.")


async def check_weights(samplers: Samplers, version: int, expected: Mapping[str, str]) -> None:
    """Raise SamplerError, with the names of tensors, when a sampler holds others than the trainer gave away."""
    for number, ranks in enumerate(await samplers.fingerprints()):
        for found in ranks:
            if wrong := differing(expected, found):
                more = f", and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
                raise SamplerError(
                    f"{samplers.describe(number)} does not hold the trainer's weights of version {version}: "
                    f"{'; '.join(wrong[:MAX_NAMED])}{more}."
                )


def differing(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """What is wrong with each tensor that differs, is missing or was never given away; by name."""
    return [
        f"{name} has fingerprint {found.get(name, 'none')} instead of {expected.get(name, 'none')}"
        for name in sorted({*expected, *found})
        if expected.get(name) != found.get(name)
    ]
