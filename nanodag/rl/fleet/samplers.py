"""Several samplers of the same weights behind one client, kept alive. No torch here.

A sampler that dies, or that does not answer for a while and is then killed, is started again with the current weights;
what it was asked is asked of another one meanwhile. Who answers a prompt does not show when the samplers are
deterministic: its seed and the weights decide the tokens. A sampler that is lost again and again ends the stage.

Servers that somebody else runs are among them while they answer (nanodag.rl.fleet.external_servers).

A stage's loop may stop between two calls: the samplers then go on, and what happened to them is met at the next call.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nanodag.errors import SamplerError, SamplerLost
from nanodag.errors.words import counted
from nanodag.host.threads import in_thread
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import Completion, PauseMode, Request
from nanodag.rl.fleet.attached import Attachments, check_answers
from nanodag.rl.fleet.external_servers import ServersOfOthers
from nanodag.rl.fleet.replica import Current, Member, Replica
from nanodag.rl.fleet.router import Router
from nanodag.rl.fleet.router_client import RoutedPrompts
from nanodag.rl.fleet.server_watch import ChildServer, ServerWatch

log = logging.getLogger(__name__)
T = TypeVar("T")

Launch = Callable[[int, Path, int], ChildServer]
"""launch(number, model folder, version): a server that answers. Blocks; raises SamplerLost with the end of the log."""


class Samplers:
    """Sends each prompt to the sampler with the fewest under way, and new weights to all.

    servers: running ones. model, version: what they were started with. launch: starts one again; connect: a client of
    it. is_stopping: true once a stop was asked for; then nothing is started again. health_every_s, health_timeout_s:
    how often a sampler that has something under way is asked for its health, and how long it may take to answer.
    max_restarts: so many times in a row may one be lost, and may one prompt lose its sampler.

    attachments: servers of others; None for none.

    router: shares prompts out in this one's place. pause: what becomes of requests that are under way when weights
    come; None to wait for them.

    provide: awaited with a folder of weights that one is about to be started with, or to take. give: awaited with a
    client, a folder and its version, gives one the weights, also a server of others that came back; raises
    SamplerError.
    """

    def __init__(
        self,
        servers: Sequence[ChildServer],
        *,
        model: Path,
        version: int,
        launch: Launch,
        connect: Callable[[str], SamplerClient],
        is_stopping: Callable[[], bool] = lambda: False,
        health_every_s: float = 5.0,
        health_timeout_s: float = 60.0,
        max_restarts: int = 3,
        router: Router | None = None,
        pause: PauseMode | None = None,
        attachments: Attachments | None = None,
    ) -> None:
        self._launch = launch
        self._pause = pause
        self._is_paused = False
        self._connect = connect
        self._is_stopping = is_stopping
        self._health_every_s, self._health_timeout_s = health_every_s, health_timeout_s
        self._max_restarts = max_restarts
        self._current = Current(model, version)
        self.replicas = [Replica(number) for number in range(len(servers))]
        for replica, server in zip(self.replicas, servers, strict=True):
            self._take_up(replica, server, model, version)
        self._others: ServersOfOthers | None = None
        if attachments is not None:
            # A lambda, because a weight sync sets another `give` later.
            self._others = ServersOfOthers(
                attachments, self.replicas, self._current, take_up=self._take_up, give=lambda *what: self.give(*what)
            )
        self._router = router
        self._routed: RoutedPrompts | None = None
        if router is not None:
            self._routed = RoutedPrompts(
                router, self.replicas, max_restarts=max_restarts, until_one_up=self._choose, noticed=self._noticed
            )
            router.urls = lambda: [r.server.url for r in self.replicas if r.is_up and r.server.is_alive]
        self._holder: dict[str, Replica] = {}
        self._is_closed = False
        self.provide: Callable[[Path], Awaitable[None]] = _nothing
        self.give: Callable[[SamplerClient, Path, int], Coroutine[Any, Any, None]] = self._give_by_folder
        self.num_restarts = 0

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """For each prompt its `params.n` completions."""
        if self._routed is not None:
            return await self._routed.generate(requests)
        load = sum(request.params.n for request in requests)
        rids = [request.rid for request in requests if request.rid is not None]
        attempts = self._max_restarts + 1 + sum(bool(replica.url) for replica in self.replicas)
        for attempt in range(attempts):
            replica = await self._choose()
            server = replica.server
            if replica.url:
                for request in requests:
                    replica.client.check(request)  # what this machine refuses is no fault of the server
            had = replica.version
            self._holder.update(dict.fromkeys(rids, replica))
            replica.load += load
            try:
                answers = await replica.watched(replica.client.generate(requests))
                if replica.url:
                    check_answers(requests, answers, versions=range(had, self._current.version + 1))
                for rid in rids:  # those of a call that is given up stay, for `abort`
                    self._holder.pop(rid, None)
                return answers
            except SamplerError as error:
                if not replica.url and not isinstance(error, SamplerLost):
                    raise
                self._lost(replica, server, error)
                if attempt == attempts - 1:
                    raise SamplerLost(
                        f"A prompt lost {counted(attempt + 1, 'sampler')}, one after the other; the last: {error}. "
                        f"The end of its log:\n{server.tail()}"
                    ) from error
            finally:
                replica.load -= load
        raise AssertionError("unreachable")

    async def abort(self, rid: str) -> None:
        """End a request, if it is under way."""
        holder = self._holder.pop(rid, None)
        sent = rid if self._routed is None else self._routed.rid_there(rid)
        for replica in self.replicas if self._routed is not None else filter(None, [holder]):
            if replica.is_up:  # else it ended with its sampler
                with suppress(SamplerError if replica.url else SamplerLost):  # then it has ended
                    await replica.watched(replica.client.abort(sent))

    async def members(self) -> list[Member]:
        """All of them, when all have answered; servers of others that are here. They are to be given weights: none that
        comes back takes any by itself until `paused` has ended."""
        await self._hold_others_back()
        await self.each(lambda replica, client: client.model_info())
        return [Member(replica.number, replica.server, replica.client) for replica in self._here]

    def are_to_have(self, folder: Path, version: int) -> None:
        """Have every sampler that is started again, or comes back, from now on begin with these weights."""
        self._current.folder, self._current.version = folder, version
        if self._others is not None:
            self._others.have_news()

    def now_have(self, members: Sequence[Member]) -> None:
        """Note that these have the weights that all are to have; one that was started in the place of such a member
        has what it was started with."""
        have = {id(member.server) for member in members}
        for replica in self.replicas:
            if replica.is_here and id(replica.server) in have:
                self._has_current(replica)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Inside, who is in charge changes weights, and no server of others that comes back takes any by itself.

        Nothing is sampled: requests in flight are paused, or were ended; also by one that is started again meanwhile.
        Not without `pause`: then who changes weights waits for them."""
        try:
            await self._hold_others_back()
            async with self._all_paused():
                yield
        finally:
            if self._others is not None:
                self._others.let_go()

    async def _hold_others_back(self) -> None:
        if self._others is not None:
            await self._others.hold_back()

    @asynccontextmanager
    async def _all_paused(self) -> AsyncIterator[None]:
        if self._pause is None:
            yield
            return
        self._is_paused = True
        try:
            up = [replica for replica in self._here if replica.is_up or not replica.url]
            await asyncio.gather(*(self._if_not_lost(replica, self._pause_one) for replica in up))
            yield
        finally:
            self._is_paused = False
            # Who waited for one that is being started again could not be stopped for minutes; it goes on by itself.
            await asyncio.gather(*(self._resume(replica) for replica in self.replicas if replica.is_up))

    async def _pause_one(self, replica: Replica, client: SamplerClient) -> None:
        assert self._pause is not None
        replica.watch.is_excused = True
        await client.pause(self._pause)

    async def _resume(self, replica: Replica) -> None:
        server = replica.server
        try:
            await replica.client.resume()
        except SamplerError as error:
            if not replica.url and not isinstance(error, SamplerLost):
                raise
            self._noticed(replica, server, error)
        replica.watch.is_excused = False

    @property
    def pauses(self) -> bool:
        """Whether weights come in the midst of requests."""
        return self._pause is not None

    @property
    def forgets(self) -> bool:
        """Whether the samplers forget prompts when weights come: SGLang cannot in the midst of requests."""
        return self._pause != "in_place"

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Have every sampler take the weights in a folder, also where it has that version from another one. Returns
        when all have.

        Requests in flight are waited for, unless paused. The folder must stay until the next call: a sampler that dies
        is started with it, and the embedded one compares what it holds with it. One that has them already
        (`now_have`, or because it was started with the folder) is asked for nothing.
        """
        self.are_to_have(Path(path), version)
        await self.each(self._take)

    async def _take(self, replica: Replica, client: SamplerClient) -> None:
        if replica.folder == self._current.folder:
            return
        server, watch = replica.server, replica.watch
        watch.is_excused = True
        try:
            await self.give(client, self._current.folder, self._current.version)
            if server is replica.server and replica.is_here:
                self._has_current(replica)
        finally:
            watch.is_excused = self._is_paused

    async def versions(self) -> list[str]:
        """The weights that each sampler says it has."""
        return list((await self.each(Replica.version_there, are_up=True)).values())

    async def fingerprints(self) -> list[list[dict[str, str]]]:
        """Of the weights that each sampler holds, by rank and tensor; no rank of one that is left out."""
        found = await self.each(lambda replica, client: client.fingerprints(), are_up=True)
        return [found.get(replica, []) for replica in self.replicas]

    def close(self) -> None:
        """End them all; none is started again."""
        self._is_closed = True
        if self._router is not None:
            self._router.close()
        for replica in self.replicas:
            if replica.is_here:
                replica.server.stop()

    async def disconnect(self) -> None:
        """Close the connections to all of them; the samplers go on."""
        if self._others is not None:
            await self._others.disconnect()
        replicas = [replica for replica in self.replicas if hasattr(replica, "client")]
        await asyncio.gather(*(replica.watch.leave() for replica in replicas))
        await asyncio.gather(*(replica.client.close() for replica in replicas))
        if self._router is not None:
            await self._router.disconnect()

    async def _on(self, replica: Replica, call: Callable[[SamplerClient], Awaitable[T]]) -> T:
        """Call it on one sampler; again on the one that takes its place, when it is lost."""
        while True:
            await replica.until_up()
            server = replica.server
            try:
                return await replica.watched(call(replica.client))
            except SamplerLost as error:
                self._lost(replica, server, error)

    async def each(
        self, call: Callable[[Replica, SamplerClient], Awaitable[T]], *, are_up: bool = False
    ) -> dict[Replica, T]:
        """Call it on every sampler, as `_on`, and on every server of others that is here, or up, of which one that is
        lost meanwhile is left out. Waits until there is one."""
        began = time.monotonic()
        while True:
            self._arrange()
            if self._others is not None:
                await self._others.all_tried()
            if are_up and self._are_others_held_back:  # in the midst of a sync: who came back gets its weights here
                stale = [replica for replica in self._here if not replica.is_up and replica.url]
                await asyncio.gather(*(self._if_not_lost(replica, self._take) for replica in stale))
            there = [replica for replica in self._here if replica.is_up or not are_up or not replica.url]
            found = await asyncio.gather(*(self._if_not_lost(replica, call) for replica in there))
            if answers := {replica: answer for replica, answer in zip(there, found, strict=True) if answer is not None}:
                return {replica: answer for replica, (answer,) in answers.items()}
            await self._one_more(began)

    async def _if_not_lost(
        self, replica: Replica, call: Callable[[Replica, SamplerClient], Awaitable[T]]
    ) -> tuple[T] | None:
        if not replica.url:
            return (await self._on(replica, partial(call, replica)),)
        server = replica.server
        try:
            return (await replica.watched(call(replica, replica.client)),)
        except SamplerError as error:
            self._lost(replica, server, error)
            return None

    async def _choose(self) -> Replica:
        """The one with the fewest under way; waits while all are being started again."""
        began = time.monotonic()
        while True:
            self._arrange()
            for replica in self.replicas:
                if replica.restart is not None and replica.restart.done():
                    await replica.until_up()
            if up := [replica for replica in self.replicas if replica.is_up]:
                return min(up, key=lambda replica: replica.load)
            await self._one_more(began)

    async def _one_more(self, began: float) -> None:
        """Return when one more may be up. Raises SamplerLost when none comes."""
        restarts = [replica.restart for replica in self.replicas if replica.restart is not None]
        if self._others is not None:
            await self._others.one_more(began, restarts)
        else:
            await asyncio.wait(restarts, return_when=asyncio.FIRST_COMPLETED)

    def _arrange(self) -> None:
        if self._others is not None and not self._is_closed:
            self._others.arrange()

    @property
    def _are_others_held_back(self) -> bool:
        return self._others is not None and self._others.are_held_back

    @property
    def _here(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_here]

    def _lost(self, replica: Replica, server: ChildServer, error: SamplerError) -> None:
        """Begin to replace a server that was lost, unless that has begun. Raises when it is lost too often. One of
        others is left out."""
        if server is not replica.server or (replica.restart is not None and not (replica.url and replica.is_here)):
            return
        if self._is_stopping() or self._is_closed:
            raise error
        if replica.url:
            assert self._others is not None
            self._others.leave_out(replica, error)
            return
        replica.count_loss(error, most=self._max_restarts)
        log.warning("%s was lost and is started again: %s", replica.name, error)
        replica.begin(self._replace(replica))

    def _noticed(self, replica: Replica, server: ChildServer, error: SamplerError) -> None:
        """The same for who has nobody to raise to: whoever needs the sampler next meets the error."""
        try:
            self._lost(replica, server, error)
        except SamplerError as final:
            replica.restart = asyncio.get_running_loop().create_future()
            replica.restart.set_exception(final)
            replica.restart.exception()  # asyncio is not to complain if nobody does

    async def _replace(self, replica: Replica) -> None:
        """Start a server in a lost one's place, with the current weights."""
        await replica.watch.leave()
        replica.server.kill()
        await replica.client.close()
        await self._rearrange()
        while True:
            model, version = self._current.folder, self._current.version
            await self.provide(model)
            if model != self._current.folder:  # they are to have others by now
                continue
            try:
                server = await in_thread(partial(self._launch, replica.number, model, version))
            except SamplerLost as error:
                replica.count_loss(error, most=self._max_restarts)
                continue
            break
        if self._is_closed:
            server.stop()
            raise SamplerLost("the stage is ending")
        self._take_up(replica, server, model, version)
        self.num_restarts += 1
        log.info("%s is up again, with weights %d", replica.name, version)
        if self._is_paused:
            with suppress(SamplerLost):  # then whoever asks it next meets it
                await self._pause_one(replica, replica.client)
            if not self._is_paused:  # any more
                await self._resume(replica)
        replica.restart = None
        await self._rearrange()

    async def _give_by_folder(self, client: SamplerClient, folder: Path, version: int) -> None:
        await self.provide(folder)
        was_away = any(replica.client is client and not replica.is_up for replica in self.replicas)
        await client.update_weights_from_disk(str(folder), version, flush_cache=self.forgets or was_away)

    def _has_current(self, replica: Replica) -> None:
        """Note that it has the weights that all are to have; a server of others is up then."""
        replica.folder, replica.version = self._current.folder, self._current.version
        if replica.url:
            assert self._others is not None
            self._others.takes_part(replica)

    async def _rearrange(self) -> None:
        if self._router is not None:
            self._router.disarrange()
            with suppress(SamplerLost):  # whoever generates next meets it
                await self._router.arrange()

    def _take_up(
        self, replica: Replica, server: ChildServer, folder: Path, version: int, client: SamplerClient | None = None
    ) -> None:
        """Note that a server, which has a folder's weights, is this sampler's."""
        replica.server, replica.folder, replica.version = server, folder, version
        replica.client = self._connect(server.url) if client is None else client
        replica.released = set()
        replica.watch = ServerWatch(
            server,
            replica.client,
            every_s=self._health_every_s,
            timeout_s=self._health_timeout_s,
            must_answer=bool(replica.url),
            on_end=partial(self._noticed, replica, server),
        )


async def _nothing(folder: Path) -> None:
    pass
