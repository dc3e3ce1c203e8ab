"""Gives the samplers the trainer's weights, and makes sure that they have them. No torch here.

Two halves: `publish` is the trainer's, whose weights are then ready to be loaded, `load` the samplers'; between them
the samplers may still be busy with older weights. `load` pauses them for as long as it must. When it returns, every
sampler samples with the weights that were published so; it raises SamplerError when one does not hold them. The first
weights and every `sync_check_every`th after them are verified. The trainer fingerprints every tensor that it gives
away, and each sampler every tensor that it then holds (nanodag/sampler/fingerprints.py). A tensor that differs ends the
stage with an error that names it.

There are three ways; the others are in nanodag.rl.sync.broadcast_sync. disk: rank 0 writes a Hugging
Face directory, parameters gathered in buckets, and the samplers read it. The directory must stay until the next weights
are loaded, because a sampler that dies is started again with it.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from nanodag.engines.fleet import Fleet
from nanodag.errors import SamplerError
from nanodag.errors.words import counted

log = logging.getLogger(__name__)

MAX_NAMED = 5

Ask = Callable[..., Awaitable[list[dict[str, Any]]]]
"""ask("export", folder=...): has every rank of the trainer do something; their replies, by rank."""


class DiskSync:
    """Through a folder. check_every: the first weights and every one of that number are verified, 0 for none.
    gives_adapters: alone, to samplers that were started with their base."""

    keeps_trainer = False  # it may train further before the samplers have loaded what it published

    def __init__(self, samplers: Fleet, ask: Ask, *, check_every: int, gives_adapters: bool = False) -> None:
        # Of each sync, or half of one: bytes, seconds, and for how many of them the samplers stood still because of it.
        self._costs: list[tuple[int, float, float]] = []
        self._samplers, self._ask = samplers, ask
        self._export = "export_adapter" if gives_adapters else "export"
        self._check_every, self._num_given = check_every, 0
        self._fingerprints: dict[int, Mapping[str, str]] = {}

    async def publish(self, folder: Path, version: int) -> None:
        """Have the trainer write its weights."""
        is_checked = self._are_next_checked()
        began = time.monotonic()
        replies = await self._ask(self._export, folder=str(folder), fingerprint=is_checked)
        if is_checked:
            self._fingerprints[version] = replies[0]["fingerprints"]
        self._costs.append((0, time.monotonic() - began, 0.0))
        log.info("weights %d: written in %.3f s", version, time.monotonic() - began)

    async def load(self, folder: Path, version: int) -> None:
        """Have the samplers read them, and see that they did."""
        began = time.monotonic()
        async with self._samplers.paused():
            await self._samplers.update_weights_from_disk(str(folder), version)
            await check_versions(self._samplers, version)
        loaded = time.monotonic()
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        self._costs.append((num_bytes, loaded - began, loaded - began))
        checked = await verified(self._samplers, version, self._fingerprints.pop(version, {}))
        log.info("weights %d: loaded in %.3f s%s", version, loaded - began, checked)

    async def write(self, folder: Path) -> None:
        """It was written when they were published."""

    def taken(self) -> dict[str, float]:
        """Metrics of the syncs since this was called last; none where nothing was given."""
        num_bytes, seconds, still_s = (sum(each) for each in zip(*self._costs, (0, 0.0, 0.0), strict=True))
        self._costs = []
        if not num_bytes:
            return {}
        rate = num_bytes / 1e9 / max(seconds, 1e-9)
        return {"sync_bytes": num_bytes, "sync_gb_per_second": rate, "seconds_samplers_still": still_s}

    def _are_next_checked(self) -> bool:
        """True where the weights that are given now are to be verified; counts them."""
        self._num_given += 1
        return self._check_every > 0 and (self._num_given - 1) % self._check_every == 0


async def check_versions(samplers: Fleet, version: int) -> None:
    """Raise SamplerError when a sampler does not say that it has these weights."""
    held_versions = await samplers.versions()
    if set(held_versions) != {str(version)}:
        raise SamplerError(f"The samplers say that they have weights {held_versions} after they were given {version}.")


async def verified(samplers: Fleet, version: int, expected: Mapping[str, str]) -> str:
    """Words on what was verified; "" where there is nothing to compare with. Raises SamplerError, with the names
    of tensors, when a sampler holds others than the trainer gave away."""
    if not expected:
        return ""
    began, each = time.monotonic(), await samplers.fingerprints()
    if all(len(ranks) != 1 for ranks in each):
        return ", not verified: each server has several ranks"
    for number, ranks in enumerate(each):
        for held in ranks if len(ranks) == 1 else ():  # of several each holds parts of tensors
            if wrong := differing(expected, held):
                more = f", and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
                raise SamplerError(
                    f"{samplers.replicas[number].name} does not hold the trainer's weights of version {version}: "
                    f"{'; '.join(wrong[:MAX_NAMED])}{more}."
                )
    return f", {counted(len(expected), 'tensor')} verified in {time.monotonic() - began:.3f} s"


def differing(expected: Mapping[str, str], held: Mapping[str, str]) -> list[str]:
    """Fault of each tensor that differs, is missing or was never given away; by name."""
    return [
        f"{name} has fingerprint {held.get(name, 'none')} instead of {expected.get(name, 'none')}"
        for name in sorted({*expected, *held})
        if expected.get(name) != held.get(name)
    ]
