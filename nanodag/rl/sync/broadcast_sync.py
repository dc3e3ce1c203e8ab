"""The controller's half of the distributed weight sync: the trainer's rank 0 and the samplers form a process group, and
the weights are broadcast through it, bucket by bucket. No torch here, no file.

Samplers that receive beside generation go on answering meanwhile, and stand still for the swap alone; the others are
paused from the first bucket to the last. The trainer's weights are the samplers' source, so it trains no further before
they have them (`keeps_trainer`); each of its ranks then keeps a copy of its own share of them. When samplers or their
number have changed a new group is made.

When anything goes wrong (a sampler dies, hangs, refuses) what the samplers hold may be half new: the trainer writes
what it had broadcast into a folder, samplers that do not answer are killed, and all take the folder's weights before
they are asked for anything else. So does one that is lost later and started again. One on another machine, which may
not see the folder, is sent them again through a group of its own. The next weights are broadcast again.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nanodag.engines.fleet import Fleet
from nanodag.engines.replica import Member
from nanodag.errors import SamplerError, SamplerLost
from nanodag.errors.words import counted
from nanodag.host.ports import LOOPBACK, address_towards
from nanodag.host.threads import cancelled
from nanodag.inference.addresses import Address
from nanodag.inference.client import SamplerClient
from nanodag.inference.nccl import TWO_VERSIONS
from nanodag.inference.weight_bodies import Bucket
from nanodag.rl.sync.weight_sync import Ask, DiskSync, check_versions, verified

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""For a sampler to leave a group, and to notice that the trainer has given up."""
Replies = list[dict[str, Any]]


class DistributedSync(DiskSync):
    """Through a process group; what comes out of a checkpoint goes through its folder. check_every: as of DiskSync.
    timeout_s: for a sampler to end what it has received.

    address: of this machine, on which rank 0 listens; "" for loopback, or, with a sampler on another machine, the one
    by which this machine reaches it. backend: gloo or nccl. is_beside: samplers receive beside generation.
    """

    keeps_trainer, _how = True, "broadcast"

    def __init__(
        self,
        samplers: Fleet,
        ask: Ask,
        *,
        check_every: int,
        timeout_s: float,
        address: str = "",
        backend: str = "gloo",
        is_beside: bool = False,
        gives_adapters: bool = False,
    ) -> None:
        super().__init__(samplers, ask, check_every=check_every, gives_adapters=gives_adapters)
        self._timeout_s = timeout_s
        self._address, self._backend = address, backend
        self._is_beside = is_beside
        self._buckets: list[Bucket] = []
        self._lora_scale: float | None = None  # of adapters alone
        self._members: list[Member] = []
        self._name = ""
        self._kept = Path()  # the folder of what was given last, whether it exists or not: the trainer can write it
        self._writing = asyncio.Lock()
        self._group_in_use = asyncio.Lock()
        samplers.provide, samplers.give = self.write, self.give

    async def publish(self, folder: Path, version: int) -> None:
        """Nothing yet: they are given when the samplers take them."""

    async def load(self, folder: Path, version: int) -> None:
        """Give the samplers the trainer's weights, and see that they have them."""
        if folder.is_dir():  # out of a checkpoint: the trainer's own are newer
            await super().load(folder, version)
            return
        began = time.monotonic()
        is_checked = self._are_next_checked()
        async with AsyncExitStack() as standing:
            if not self._is_beside:
                await standing.enter_async_context(self._samplers.paused())
            members = await self._samplers.members()
            async with self._group_in_use:
                replies, failure = await self._give_all(members, folder, version, fingerprint=is_checked)
            still = time.monotonic() if self._is_beside and self._samplers.pause is not None else began
            if self._is_beside:
                await standing.enter_async_context(self._samplers.paused())
            failure = failure or await self._settled(members, [m.client.end_weight_update() for m in members])
            if failure:
                log.warning("weights %d could not be %s and are given again: %s", version, self._how, failure)
                ends = (self._tried(m.client.end_weight_update(), timeout_s=self._timeout_s) for m in members)
                await asyncio.gather(*ends)  # of what has been left begun
                await self._leave([member.client for member in members])
            else:
                self._samplers.now_have(members)
            await self._samplers.update_weights_from_disk(str(folder), version)  # who has them is asked for nothing
            await check_versions(self._samplers, version)
        loaded = time.monotonic()
        num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        self._costs.append((num_bytes, loaded - began, loaded - still))
        how = f"{self._how} in {counted(len(self._buckets), 'bucket')}"
        how = f"loaded after they could not be {self._how}," if failure else how
        checked = await verified(self._samplers, version, replies[0]["fingerprints"])
        took = f"{loaded - began:.3f} s, for {loaded - still:.3f} s samplers stood still"
        log.info("weights %d: %s in %s%s", version, how, took, checked)

    async def write(self, folder: Path) -> None:
        """Have the folder of what was given last exist, for one that is started with it. Of older weights there is
        only what was written while they were the last."""
        async with self._writing:
            if folder == self._kept and not folder.is_dir():
                await self._ask(self._export, folder=str(folder), kept=True)

    async def give(self, client: SamplerClient, folder: Path, version: int) -> None:
        """Give one sampler weights that it lacks: those that were given last, or those of a folder. Raises SamplerLost
        when it does not take part, SamplerError when it refuses, or they are no more."""
        if is_here(client):
            await self.write(folder)
            await client.update_weights_from_disk(str(folder), version, flush_cache=self._samplers.forgets)
            return
        async with self._group_in_use:
            if folder != self._kept and not folder.is_dir():
                raise SamplerError(f"Weights {version} cannot be given to {client.url}: newer ones have replaced them.")
            await self._give_one(client, "kept" if folder == self._kept else str(folder), version)

    # What is another way with another transport

    async def _give_all(
        self, members: Sequence[Member], folder: Path, version: int, *, fingerprint: bool
    ) -> tuple[Replies, str]:
        """The trainer's replies, and what went wrong on whichever side, else ""."""
        failure = await self._meet(members)
        # From here on, so that one that is lost in the middle is not started with the weights before.
        self._now_given(folder, version)
        work = self._ask("broadcast", which="now", fingerprint=fingerprint)  # where there is no group they are kept
        calls = [] if failure else [self._receive(member.client, version) for member in members]
        replies, broadcast_failure = await self._both(work, members, calls)
        if failure or broadcast_failure:
            self._members = []
        return replies, failure or broadcast_failure

    # Of use to them all

    def _now_given(self, folder: Path, version: int) -> None:
        """Have every sampler that comes from now on take these. What makes the trainer keep them is asked next."""
        self._samplers.have_weights(folder, version)
        self._kept = folder

    async def _learn_buckets(self) -> None:
        if not self._buckets:
            layout = (await self._ask("layout"))[0]
            self._buckets, self._lora_scale = [Bucket(**of) for of in layout["buckets"]], layout.get("lora_scale")

    async def _both(
        self, work: Awaitable[Replies], members: Sequence[Member], calls: Sequence[Coroutine[Any, Any, None]]
    ) -> tuple[Replies, str]:
        """The trainer's work, and that of samplers beside it: the trainer's replies, and what went wrong, else ""."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        unanswered: set[asyncio.Future[None]] = set()
        try:
            replies = await work
            told = str(replies[0]["failure"])
            if tasks:
                _, unanswered = await asyncio.wait(tasks, timeout=0.0 if told else self._timeout_s)
            if unanswered:  # one that is well may wait for another that is lost, until it is told to leave
                waiting = [member.client for member, task in zip(members, tasks, strict=True) if task in unanswered]
                await self._leave(waiting)
        except BaseException:
            await cancelled(*tasks)
            raise
        failure = await self._settled(members, tasks, timeout_s=GRACE_S)
        late = "a sampler was told to leave the group" if unanswered else ""  # it may have answered just then
        return replies, told or failure or late

    async def _settled(self, members: Sequence[Member], calls: Sequence[Any], *, timeout_s: float | None = None) -> str:
        """Wait for a call to each sampler; the first failure, else "". One that does not answer is killed."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        failure = ""
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=self._timeout_s if timeout_s is None else timeout_s)
        finally:
            outcomes = await cancelled(*tasks)
        for member, error in zip(members, outcomes, strict=False):  # no calls where there is no group
            if error is not None and not isinstance(error, SamplerError | asyncio.CancelledError):
                raise error
            if isinstance(error, asyncio.CancelledError):
                log.warning("%s does not answer in a weight sync: killed", self._samplers.replicas[member.number].name)
                member.server.kill()
            if error is not None:
                failure = failure or str(error) or "a sampler does not answer"
        return failure

    async def _tried(self, call: Awaitable[None], *, timeout_s: float) -> None:
        """A call that may fail: what it undoes may not be there, and a sampler that is lost is met by the next call."""
        with suppress(SamplerError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await call

    async def _meet(self, members: Sequence[Member]) -> str:
        """Have the trainer's rank 0 and the samplers in a group that has no other members; what went wrong, else ""."""
        await self._learn_buckets()
        if [member.server for member in members] == [member.server for member in self._members]:
            return ""
        await self._leave([member.client for member in self._members if member in members])
        joining = await self._opened([member.client for member in members])
        _, failure = await self._both(self._ask("join_group"), members, joining)
        if failure:  # NCCL's rank 0 has a group by then, whoever came, and would wait in it for those who did not
            await self._ask("leave_group")
            _raise_if_for_good(failure)
        else:
            self._members = list(members)
        return failure

    async def _opened(self, clients: Sequence[SamplerClient]) -> list[Coroutine[Any, Any, None]]:
        """Have rank 0 listen for samplers in a new group: a call for each, with which it joins."""
        address = self._address or address_for(clients)
        name = self._name = f"weights-{secrets.token_hex(8)}"  # a server keeps the name of one that it could not leave
        *firsts, size = accumulate((client.num_ranks for client in clients), initial=1)
        where = {"address": address, "backend": self._backend}
        port = (await self._ask("open_group", name=name, size=size, **where))[0]["port"]
        log.info("weights go out from %s port %d (%s) to %s", address, port, self._backend, [c.url for c in clients])
        return [
            client.join_weight_group(name=name, port=port, rank=first, size=size, **where)
            for first, client in zip(firsts, clients, strict=True)
        ]

    async def _leave(self, clients: Sequence[SamplerClient]) -> None:
        """Have these leave the group that there is."""
        self._members = []
        calls = (self._tried(client.leave_weight_group(self._name), timeout_s=GRACE_S) for client in clients)
        await asyncio.gather(*calls)

    async def _receive(self, client: SamplerClient, version: int) -> None:
        """One sampler's side of a broadcast, but for its end."""
        await client.begin_weight_update(self._lora_scale)
        for bucket in self._buckets:
            await client.receive_weights(
                bucket,
                group=self._name,
                version=version if bucket is self._buckets[-1] else None,
                flush_cache=self._samplers.forgets,
            )

    async def _give_one(self, client: SamplerClient, which: str, version: int) -> None:
        """A broadcast to one sampler alone."""
        await self._learn_buckets()
        try:  # the trainer would wait for one that is lost
            async with asyncio.timeout(GRACE_S):
                await client.model_info()
        except TimeoutError as late:
            raise SamplerLost(f"the sampler at {client.url} does not answer within {GRACE_S:g} s") from late
        await self._leave([member.client for member in self._members])
        (joins,) = await self._opened([client])

        async def take() -> None:
            await self._receive(client, version)
            await client.end_weight_update()

        try:
            await self._beside(self._ask("join_group"), joins, client)
            await self._beside(self._ask("broadcast", which=which, fingerprint=False), take(), client)
        except SamplerError as error:
            await self._ask("leave_group")
            _raise_if_for_good(str(error))
            raise
        await self._leave([client])
        log.info("weights %d: given to %s alone", version, client.url)

    async def _beside(self, work: Awaitable[Replies], call: Coroutine[Any, Any, None], client: SamplerClient) -> None:
        """The trainer's work, and one sampler's call beside it. Raises SamplerError where either fails, SamplerLost for
        a sampler that does not answer."""
        calling = asyncio.ensure_future(call)
        try:
            failure = (await work)[0]["failure"]
            await asyncio.wait([calling], timeout=GRACE_S if failure else self._timeout_s)
        finally:
            (error,) = await cancelled(calling)
        if isinstance(error, asyncio.CancelledError):
            raise SamplerLost(f"the sampler at {client.url} does not answer in a weight sync")
        if isinstance(error, Exception):
            raise error
        if failure:
            raise SamplerError(failure)


class SharedSync(DistributedSync):
    """By handles of tensors in memory that both sides see, one bucket after the other, and each sampler of this machine
    copies it. On a CPU rank 0 shares it in /dev/shm; on GPUs each rank its own GPU's memory, which the samplers there
    can open and no other.

    senders: for each rank of each of the stage's own samplers the trainer's rank that shares with it; 0 for all others.
    """

    _how = "shared"

    def __init__(self, samplers: Fleet, ask: Ask, *, senders: Sequence[Sequence[int]] = (), **options: Any) -> None:
        super().__init__(samplers, ask, **options)
        self._senders = senders

    async def _give_all(
        self, members: Sequence[Member], folder: Path, version: int, *, fingerprint: bool
    ) -> tuple[Replies, str]:
        if elsewhere := [member.client.url for member in members if not is_here(member.client)]:
            raise SamplerError(
                f"weights.sync: ipc reaches samplers of this machine alone, and {elsewhere[0]} is on another one; "
                "use weights.sync: distributed"
            )
        await self._learn_buckets()
        self._now_given(folder, version)
        own, num_own = self._senders, len(self._senders)
        senders = [own[m.number] if m.number < num_own else [0] * m.client.num_ranks for m in members]
        each = [rank for of_member in senders for rank in of_member]
        counts = [each.count(rank) for rank in range(max(each, default=0) + 1)]
        failure, replies = "", []
        for number in range(len(self._buckets)):
            # Every bucket is asked for: the ranks keep in step, and the fingerprints become whole.
            wanted = [0] * len(counts) if failure else counts
            replies = await self._ask("share", number=number, counts=wanted, fingerprint=fingerprint)
            failure = failure or next((reply["failure"] for reply in replies if reply["failure"]), "")
            if not failure:
                handles = [iter(reply["handles"]) for reply in replies]
                calls = [
                    self._take(member.client, [next(handles[rank]) for rank in ranks], number, version)
                    for member, ranks in zip(members, senders, strict=True)
                ]
                failure = await self._settled(members, calls)
        return replies, failure

    async def _take(self, client: SamplerClient, handles: Sequence[str], number: int, version: int) -> None:
        """One sampler's copy of a bucket. handles: one for each of its ranks."""
        if number == 0:
            await client.begin_weight_update(self._lora_scale)
        is_last = number + 1 == len(self._buckets)
        await client.take_weights(handles, version=version if is_last else None, flush_cache=self._samplers.forgets)


def _raise_if_for_good(failure: str) -> None:
    """Raise SamplerError for what another group would meet as well."""
    if TWO_VERSIONS in failure:
        raise SamplerError(f"Weights cannot be broadcast. {failure}")


def is_here(client: SamplerClient) -> bool:
    """True when a sampler answers on loopback, so that it sees the folders of this machine."""
    return Address(client.url).is_here


def address_for(clients: Sequence[SamplerClient]) -> str:
    """The address of this machine by which it reaches samplers elsewhere; loopback where there are none."""
    elsewhere = [urlsplit(client.url).hostname or "" for client in clients if not is_here(client)]
    return address_towards(elsewhere[0]) if elsewhere else LOOPBACK
