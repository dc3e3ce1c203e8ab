"""A fleet: several engines of the same weights behind one client, kept alive. RL, evaluation and serving each have one.

An engine that dies, or that does not answer for a while and is then killed, is started again with the current weights;
what it was asked is asked of another one meanwhile. Who answers a prompt does not show when the engines are
deterministic: its seed and the weights decide the tokens. Servers that somebody else runs are among them while they
answer (`external.py`).

The event loop may stop between two calls: the engines then go on, and what happened to them is met at the next call.
No torch here.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from nanodag.engines.replica import Member, Replica
from nanodag.engines.roster import Roster
from nanodag.engines.start import start_engines
from nanodag.engines.watch import AnyServer
from nanodag.errors import SamplerError, SamplerLost
from nanodag.errors.words import counted
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import Completion, Request

T = TypeVar("T")

DEATH_IS_SEEN_S = 0.25  # after a connection that broke


class Fleet(Roster):
    """Sends each prompt to the engine with the fewest under way, and new weights to all. Arguments as of `Roster`."""

    async def start(self, count: int) -> None:
        """Start so many engines at once. Raises SamplerLost, with none left, when one cannot."""
        folder, version = self.current.folder, self.current.version
        self.add(await start_engines(lambda number: self.launch(number, folder, version), count))

    @property
    def is_ready(self) -> bool:
        """True when one would answer now."""
        return bool(self.up)

    @property
    def weight_version(self) -> str:
        """The weights that all are to have."""
        return str(self.current.version)

    @property
    def load(self) -> int:
        """Samples under way, those that wait in an engine included."""
        return sum(replica.load for replica in self.replicas)

    @property
    def _num_attempts(self) -> int:
        restarts = 1 if self.max_restarts is None else self.max_restarts
        return 1 + restarts + sum(not replica.is_own for replica in self.replicas)

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """For each prompt its `params.n` completions."""
        load = sum(request.params.n for request in requests)
        rids = [request.rid for request in requests if request.rid is not None]
        replica = None
        for attempts_left in reversed(range(self._num_attempts)):
            replica = await self.choose(but=replica)
            server, first = replica.server, replica.version
            for request in requests:  # what this machine refuses is no fault of the server
                replica.client.check(request)
            self._holder.update(dict.fromkeys(rids, replica))
            replica.load += load
            try:
                answers = await replica.watched(replica.client.generate(requests))
                replica.check_answers(requests, answers, first, self.current.version)
                for rid in rids:  # those of a call that is given up stay, for `abort`
                    self._holder.pop(rid, None)
                return answers
            except replica.faults as error:
                await self._asked_in_vain(replica, server, error, attempts_left)
            finally:
                replica.load -= load
        raise AssertionError("unreachable")

    async def answer(self, request: Request, *, stream: bool) -> AsyncGenerator[Completion, None]:
        """One sample (params.n is 1), as it grows: each item holds all of it so far; without `stream` the last alone.
        An engine that is lost before the first is no loss. Raises SamplerLost for one that is lost later."""
        if not stream:
            ((completion,),) = await self.generate([request])
            yield completion
            return
        replica = None
        for attempts_left in reversed(range(self._num_attempts)):
            replica = await self.choose(but=replica)
            server, has_begun = replica.server, False
            replica.load += 1
            try:
                with replica.watch.during():
                    async with aclosing(replica.client.stream(request)) as parts:
                        async for completion in parts:
                            has_begun, replica.lost_in_a_row = True, 0
                            yield completion
                return
            except replica.faults as error:
                await self._asked_in_vain(replica, server, error, 0 if has_begun else attempts_left)
            finally:
                replica.load -= 1

    async def _asked_in_vain(
        self, replica: Replica, server: AnyServer, error: SamplerError, attempts_left: int
    ) -> None:
        """Note that one was lost. Raises SamplerLost where nobody else is to be asked."""
        if replica.is_own and not replica.is_awaited:  # others wait for its answers
            deadline = time.monotonic() + DEATH_IS_SEEN_S
            while server.is_alive and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
            if server.is_alive:  # a connection broke; of a silent engine the watch tells
                if not attempts_left:
                    raise error
                return
        self.lost(replica, server, error)
        if not attempts_left:
            if not replica.is_awaited and replica.is_own:
                raise error
            raise SamplerLost(
                f"A prompt lost {counted(self._num_attempts, 'sampler')}, one after the other; the last: {error}. The "
                f"end of its log:\n{server.tail()}"
            ) from error

    async def abort(self, rid: str) -> None:
        """End a request, if it is under way."""
        holder = self._holder.pop(rid, None)
        if holder is not None and holder.is_up:  # else it ended with its sampler
            with suppress(holder.faults):  # then it has ended
                await holder.watched(holder.client.abort(rid))

    async def members(self) -> list[Member]:
        """All of them, when all have answered; servers of others that are here. They are to be given weights: none that
        comes back takes any by itself until `paused` has ended."""
        await self.hold_back()
        await self.each(lambda replica, client: client.model_info())
        return [Member(replica.number, replica.server, replica.client) for replica in self.here]

    def now_have(self, members: Sequence[Member]) -> None:
        """Note that these have the weights that all are to have; one that was started in the place of such a member
        has what it was started with."""
        have = {id(member.server) for member in members}
        for replica in self.here:
            if id(replica.server) in have:
                self._has_current(replica)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Inside, who is in charge changes weights, and none that comes back takes any by itself.

        Nothing is sampled: requests in flight are paused; also by one that is started again meanwhile.
        Not without `pause`: then who changes weights waits for them."""
        try:
            await self.hold_back()
            if self.pause is None:
                yield
                return
            self._is_paused = True
            try:
                there = [replica for replica in self.here if replica.is_up or replica.is_awaited]
                await asyncio.gather(*(self._if_not_lost(replica, self._pause_one) for replica in there))
                yield
            finally:
                self._is_paused = False
                # Who waited for one that is being started again could not be stopped for minutes; it goes on by itself.
                await asyncio.gather(*(self._resume(replica) for replica in self.replicas if replica.is_up))
        finally:
            self._may_give.set()

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Have every engine take the weights in a folder, also where it has that version from another one. Returns
        when all have.

        Requests in flight are waited for, unless paused. The folder must stay until the next call: an engine that dies
        is started with it, and the embedded one compares what it holds with it. One that has them already
        (`now_have`, or because it was started with the folder) is asked for nothing.
        """
        self.have_weights(Path(path), version)
        await self.each(self._take)

    async def take_weights(self, folder: Path, version: str) -> None:
        """Have one engine after the other answer with the weights in a folder. Answers under way end on the weights
        that they began with. One that is away is started again with these.

        Raises SamplerError where one refuses them: the old ones stay.
        """
        self.check(folder)
        # Looked at anew each time: one that was away may come back with the old ones while another one takes these.
        while behind := [replica for replica in self.up if (replica.folder, replica.version) != (folder, version)]:
            replica = behind[0]
            server = replica.server
            try:
                await replica.client.update_weights_from_disk(str(folder), version)
                replica.folder, replica.version = folder, version
            except SamplerLost as error:
                self.lost(replica, server, error)
            self.have_weights(folder, version)
        self.have_weights(folder, version)

    async def _take(self, replica: Replica, client: SamplerClient) -> None:
        if replica.folder == self.current.folder:
            return
        server, watch = replica.server, replica.watch
        watch.is_excused = True
        try:
            await self.give(client, self.current.folder, self.current.version)
            if server is replica.server and replica.is_here:
                self._has_current(replica)
        finally:
            watch.is_excused = self._is_paused

    def _has_current(self, replica: Replica) -> None:
        """Note that it has the weights that all are to have; one that nobody waits for is up then."""
        replica.folder, replica.version = self.current.folder, self.current.version
        if not replica.is_awaited:
            self.has_come(replica)

    async def versions(self) -> list[str]:
        """The weights that each engine says it has."""
        return list((await self.each(lambda replica, client: replica.held_version(client), are_up=True)).values())

    async def fingerprints(self) -> list[list[dict[str, str]]]:
        """Fingerprints of the weights that each engine holds, by rank and tensor; no rank of one that is left out."""
        held = await self.each(lambda replica, client: client.fingerprints(), are_up=True)
        return [held.get(replica, []) for replica in self.replicas]

    async def each(
        self, call: Callable[[Replica, SamplerClient], Awaitable[T]], *, are_up: bool = False
    ) -> dict[Replica, T]:
        """Call it on every engine that is awaited, again on the one in its place when it is lost; and on every other
        that is here, or up, of which one that is lost meanwhile is left out. Waits until there is one."""
        began = time.monotonic()
        while True:
            self.arrange()
            if not self._have_all_been_tried:
                await asyncio.gather(*(replica.was_tried.wait() for replica in self.replicas))
                self._have_all_been_tried = True
            if are_up and not self._may_give.is_set():  # in the midst of a sync: who came back gets its weights here
                stale = [replica for replica in self.here if not replica.is_up and not replica.is_awaited]
                await asyncio.gather(*(self._if_not_lost(replica, self._take) for replica in stale))
            there = [replica for replica in self.here if replica.is_up or not are_up or replica.is_awaited]
            answers = await asyncio.gather(*(self._if_not_lost(replica, call) for replica in there))
            if answered := {r: answer for r, answer in zip(there, answers, strict=True) if answer is not None}:
                return {replica: answer for replica, (answer,) in answered.items()}
            await self.one_more(began)

    async def _if_not_lost(
        self, replica: Replica, call: Callable[[Replica, SamplerClient], Awaitable[T]]
    ) -> tuple[T] | None:
        while True:
            if replica.is_awaited:
                await replica.until_up()
            server = replica.server
            try:
                return (await replica.watched(call(replica, replica.client)),)
            except replica.faults as error:
                self.lost(replica, server, error)
                if not replica.is_awaited:
                    return None

    async def end(self) -> None:
        """End them all, and the connections to them. One that is just being started is ended too, or, where nobody
        waits for it, ends with this process."""
        self.close()
        starting = [replica.restart for replica in self.replicas if replica.restart is not None and replica.is_awaited]
        await asyncio.gather(*starting, return_exceptions=True)
        await self.disconnect()
