"""The controller's half of the distributed weight sync: the trainer's rank 0 and the samplers form a process group, and
the weights are broadcast through it, bucket by bucket. No torch here, no file.

The trainer's weights are the samplers' source, so it trains no further before they have them (`keeps_trainer`); each of
its ranks then keeps a copy of its own share of them. When samplers or their number have changed a new group is made.

When anything goes wrong (a sampler dies, hangs, refuses) what the samplers hold may be half new: the trainer writes
what it had broadcast into a folder, samplers that do not answer are killed, and all take the folder's weights before
they are asked for anything else. So does one that is lost later and started again. The next weights are broadcast
again.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanodag.errors import SamplerError
from nanodag.errors.words import counted
from nanodag.inference.client import SamplerClient
from nanodag.inference.weight_bodies import Bucket
from nanodag.rl.fleet.samplers import Member, Samplers
from nanodag.rl.fleet.weight_sync import Ask, DiskSync, check_versions, check_weights

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""For a sampler to notice that the trainer has given up."""


class DistributedSync:
    """Through a process group. check_every: the first weights and every one of that number are verified, 0 for none.
    timeout_s: for a sampler to end what it has received. ranks_each: processes of one sampler, all of them members."""

    keeps_trainer = True

    def __init__(
        self, samplers: Samplers, ask: Ask, *, check_every: int, timeout_s: float, ranks_each: int = 1
    ) -> None:
        self._samplers = samplers
        self._ask = ask
        self._check_every = check_every
        self._timeout_s = timeout_s
        self._ranks_each = ranks_each
        self._from_checkpoint = DiskSync(samplers, ask, check_every=0)
        self._num_broadcasts = 0
        self._buckets: list[Bucket] = []
        self._members: list[Member] = []
        self._name = ""
        self._port = 0
        self._kept = Path()  # the folder of what was broadcast last, whether it exists or not: the trainer can write it
        self._writing = asyncio.Lock()
        samplers.provide = self.write

    async def publish(self, folder: Path, version: int) -> None:
        """Nothing yet: they are broadcast when the samplers take them."""

    async def load(self, folder: Path, version: int) -> None:
        """Broadcast the trainer's weights, and see that the samplers have them."""
        if folder.is_dir():  # out of a checkpoint: the trainer's own are newer
            await self._from_checkpoint.load(folder, version)
            return
        began = time.monotonic()
        is_checked = self._check_every > 0 and self._num_broadcasts % self._check_every == 0
        self._num_broadcasts += 1
        members = await self._samplers.members()
        is_new = [member.server for member in members] != [member.server for member in self._members]
        if is_new:
            await self._make_group(members)
        # From here on, so that one that is lost in the middle is not started with the weights before.
        self._samplers.are_to_have(folder, version)
        self._kept = folder
        replies, failure = await self._broadcast(members, version, is_new=is_new, fingerprint=is_checked)
        if failure:
            log.warning("weights %d could not be broadcast and go through a folder: %s", version, failure)
            await self._leave_group(members)
        else:
            self._samplers.now_have(members)
        await self._samplers.update_weights_from_disk(str(folder), version)  # who has them is asked for nothing
        await check_versions(self._samplers, version)
        loaded = time.monotonic()
        expected: Mapping[str, str] = replies[0]["fingerprints"]
        if expected:
            await check_weights(self._samplers, version, expected)
        checked = f", {len(expected)} tensors verified in {time.monotonic() - loaded:.3f} s" if expected else ""
        broadcast = f"broadcast in {counted(len(self._buckets), 'bucket')}"
        how = "loaded after a broadcast that failed" if failure else broadcast
        log.info("weights %d: %s in %.3f s%s", version, how, loaded - began, checked)

    async def write(self, folder: Path) -> None:
        """Have the folder of what was broadcast last exist, for one that is started with it. Of older weights there is
        only what was written while they were the last."""
        async with self._writing:
            if folder == self._kept and not folder.is_dir():
                await self._ask("export", folder=str(folder), kept=True)

    async def _make_group(self, members: Sequence[Member]) -> None:
        """Have the trainer's rank 0 wait for the samplers in a group that had no other members."""
        if not self._buckets:
            self._buckets = [Bucket(**fields) for fields in (await self._ask("layout"))[0]["buckets"]]
        old, self._members = self._members, []
        before = [member.client for member in old if member in members]
        await asyncio.gather(*(_tried(client.leave_weight_group(self._name)) for client in before))
        self._name = f"weights-{secrets.token_hex(8)}"  # a server keeps the name of one that it could not leave
        size = 1 + len(members) * self._ranks_each
        self._port = (await self._ask("open_group", name=self._name, size=size))[0]["port"]

    async def _broadcast(
        self, members: Sequence[Member], version: int, *, is_new: bool, fingerprint: bool
    ) -> tuple[list[dict[str, Any]], str]:
        """The trainer's replies, and what went wrong on whichever side, else ""."""
        size = 1 + len(members) * self._ranks_each
        receiving = [
            asyncio.ensure_future(
                self._receive(member.client, version, 1 + place * self._ranks_each if is_new else 0, size)
            )
            for place, member in enumerate(members)
        ]
        try:
            replies = await self._ask("broadcast", fingerprint=fingerprint)
            failure = replies[0]["failure"]
            await asyncio.wait(receiving, timeout=GRACE_S if failure else self._timeout_s)
        finally:
            for task in receiving:
                task.cancel()
            outcomes = await asyncio.gather(*receiving, return_exceptions=True)
        for member, error in zip(members, outcomes, strict=True):
            if error is not None and not isinstance(error, SamplerError | asyncio.CancelledError):
                raise error
            if isinstance(error, asyncio.CancelledError):
                log.warning("%s does not answer in a broadcast: killed", self._samplers.describe(member.number))
                member.server.kill()
            if error is not None:
                failure = failure or str(error)
        self._members = [] if failure else list(members)
        return replies, failure

    async def _receive(self, client: SamplerClient, version: int, rank: int, size: int) -> None:
        """One sampler's side of a broadcast. rank: 0 when it is in the group already."""
        if rank:
            await client.join_weight_group(name=self._name, port=self._port, rank=rank, size=size)
        await client.begin_weight_update()
        for bucket in self._buckets:
            is_last = bucket is self._buckets[-1]
            await client.receive_weights(
                bucket,
                group=self._name,
                version=version if is_last else None,
                flush_cache=self._samplers.forgets,
            )
        await client.end_weight_update()

    async def _leave_group(self, members: Sequence[Member]) -> None:
        """End what a broadcast that failed has left begun."""
        await asyncio.gather(*(_tried(member.client.end_weight_update()) for member in members))
        await asyncio.gather(*(_tried(member.client.leave_weight_group(self._name)) for member in members))


async def _tried(call: Awaitable[None]) -> None:
    """A call that may fail: what it undoes may not be there, and a sampler that is lost is met by the next call."""
    with suppress(SamplerError):
        await call
