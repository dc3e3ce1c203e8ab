"""Several samplers of the same weights behind one client, kept alive. No torch here.

A sampler that dies, or that does not answer for a while and is then killed, is started again with the current weights;
what it was asked is asked of another one meanwhile. Who answers a prompt does not show when the samplers are
deterministic: its seed and the weights decide the tokens. A sampler that is lost again and again ends the stage.

A stage's loop may stop between two calls: the samplers then go on, and what happened to them is met at the next call.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from nanodag.errors import BadRequest, SamplerError, SamplerLost
from nanodag.errors.words import counted
from nanodag.host.threads import in_thread
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import Completion, PauseMode, Request
from nanodag.rl.fleet.router import Router
from nanodag.rl.fleet.server_watch import ChildServer, ServerWatch

log = logging.getLogger(__name__)
MOMENT_S = 0.25  # for a server that ended to be seen to have ended; doubled at each attempt
T = TypeVar("T")


Launch = Callable[[int, Path, int], ChildServer]
"""launch(number, model folder, version): a server that answers. Blocks; raises SamplerLost with the end of the log."""


@dataclass(frozen=True)
class Member:
    """A sampler as it is now: another server in its place is another member."""

    number: int
    server: ChildServer
    client: SamplerClient


class Replica:
    """One sampler: its server, and what is under way there.

    folder: of the weights that it has. lost_in_a_row: times that it was lost without having answered anything in
    between.
    """

    server: ChildServer
    client: SamplerClient
    watch: ServerWatch
    folder: Path

    def __init__(self, number: int) -> None:
        self.number = number
        self.load = 0
        self.lost_in_a_row = 0
        self.restart: asyncio.Future[None] | None = None

    @property
    def is_up(self) -> bool:
        return self.restart is None


class Samplers:
    """Sends each prompt to the sampler with the fewest under way, and new weights to all.

    servers: running ones. model, version: what they were started with. launch: starts one again; connect: a client of
    it. is_stopping: true once a stop was asked for; then nothing is started again. health_every_s, health_timeout_s:
    how often a sampler that has something under way is asked for its health, and how long it may take to answer.
    max_restarts: so many times in a row may one be lost, and may one prompt lose its sampler.

    router: shares prompts out in this one's place. pause: what becomes of requests that are under way when weights
    come; None to wait for them.

    provide: awaited with a folder of weights that one is about to be started with, or to take. give: awaited with a
    client, a folder and its version, gives one the weights.
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
    ) -> None:
        self._launch = launch
        self._pause = pause
        self._is_paused = False
        self._connect = connect
        self._is_stopping = is_stopping
        self._health_every_s, self._health_timeout_s = health_every_s, health_timeout_s
        self._max_restarts = max_restarts
        self._model, self._version = model, version
        self._replicas = [Replica(number) for number in range(len(servers))]
        for replica, server in zip(self._replicas, servers, strict=True):
            self._take_up(replica, server, model)
        self._router = router
        if router is not None:
            router.urls = lambda: [r.server.url for r in self._replicas if r.is_up and r.server.is_alive]
        self._replacing: set[asyncio.Task[None]] = set()
        self._holder: dict[str, Replica] = {}
        self._sent: dict[str, str] = {}  # rid -> the name under which the router has it
        self._is_closed = False
        self.provide: Callable[[Path], Awaitable[None]] = _nothing
        self.give: Callable[[SamplerClient, Path, int], Awaitable[None]] = self._by_folder
        self.num_restarts = 0

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """For each prompt its `params.n` completions."""
        if self._router is not None:
            return await self._through(self._router, requests)
        load = sum(request.params.n for request in requests)
        rids = [request.rid for request in requests if request.rid is not None]
        for attempt in range(self._max_restarts + 1):
            replica = await self._choose()
            server = replica.server
            self._holder.update(dict.fromkeys(rids, replica))
            replica.load += load
            try:
                answers = await self._watched(replica, replica.client.generate(requests))
                for rid in rids:  # those of a call that is given up stay, for `abort`
                    self._holder.pop(rid, None)
                return answers
            except SamplerLost as error:
                self._lost(replica, server, error)
                if attempt == self._max_restarts:
                    raise SamplerLost(
                        f"A prompt lost {counted(attempt + 1, 'sampler')}, one after the other; the last: {error}. "
                        f"The end of its log:\n{server.last_log_lines()}"
                    ) from error
            finally:
                replica.load -= load
        raise AssertionError("unreachable")

    async def _through(self, router: Router, requests: Sequence[Request]) -> list[list[Completion]]:
        """What the samplers answer by way of the router. A request that fails is sent again, with another rid: a paused
        server may still hold the request of a router that died, and SGLang refuses a second request of the same rid."""
        for attempt in range(self._max_restarts + 1):
            await self._choose()  # waits until one is up
            named = [_of_attempt(request, attempt) for request in requests]
            pairs = zip(requests, named, strict=True)
            self._sent.update({old.rid: new.rid for old, new in pairs if old.rid and new.rid})
            work: Awaitable[list[list[Completion]]] = router.generate(named)
            for replica in self._replicas:
                if replica.is_up:
                    work = replica.watch.over(work)  # who answered is not known, so no loss is forgotten
            try:
                answers = await work
                for request in requests:  # those of a call that is given up stay, for `abort`
                    self._sent.pop(request.rid or "", None)
                return answers
            except BadRequest:
                raise
            except SamplerError as error:
                failure = error
            await asyncio.sleep(MOMENT_S * 2**attempt)
            for replica in self._replicas:
                if not replica.server.is_alive:
                    self._noticed(replica, replica.server, SamplerLost(str(failure)))
            router.disarrange()
        raise SamplerLost(
            f"A prompt failed {counted(self._max_restarts + 1, 'time')} behind the router, the last time: {failure}. "
            f"The end of the router's log:\n{router.last_log_lines()}"
        ) from failure

    async def abort(self, rid: str) -> None:
        """End a request, if it is under way."""
        holders = self._replicas if self._router is not None else filter(None, [self._holder.pop(rid, None)])
        sent = self._sent.pop(rid, rid)
        for replica in holders:
            if replica.is_up:  # else it ended with its sampler
                with suppress(SamplerLost):  # then it has ended
                    await self._watched(replica, replica.client.abort(sent))

    async def members(self) -> list[Member]:
        """All of them, when all have answered."""
        await self.versions()
        return [Member(replica.number, replica.server, replica.client) for replica in self._replicas]

    def are_to_have(self, folder: Path, version: int) -> None:
        """Have every sampler that is started again from now on begin with these weights."""
        self._model, self._version = folder, version

    def now_have(self, members: Sequence[Member]) -> None:
        """Note that these have the weights that all are to have; one that was started in the place of such a member
        has what it was started with."""
        have = {id(member.server) for member in members}
        for replica in self._replicas:
            if id(replica.server) in have:
                replica.folder = self._model

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Inside, nothing is sampled: requests in flight are paused, or were ended; also by one that is started again
        meanwhile. Not without `pause`: then who changes weights waits for them."""
        if self._pause is None:
            yield
            return
        self._is_paused = True
        try:
            await asyncio.gather(*(self._on(replica, partial(self._pause_one, replica)) for replica in self._replicas))
            yield
        finally:
            self._is_paused = False
            # Who waited for one that is being started again could not be stopped for minutes; it goes on by itself.
            await asyncio.gather(*(self._resume(replica) for replica in self._replicas if replica.is_up))

    async def _pause_one(self, replica: Replica, client: SamplerClient) -> None:
        assert self._pause is not None
        replica.watch.is_excused = True
        await client.pause(self._pause)

    async def _resume(self, replica: Replica) -> None:
        server = replica.server
        try:
            await replica.client.resume()
        except SamplerLost as error:
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
        folder = Path(path)
        self.are_to_have(folder, version)

        async def take(replica: Replica, client: SamplerClient) -> None:
            if replica.folder == folder:
                return
            watch = replica.watch
            watch.is_excused = True
            try:
                await self.give(client, folder, version)
                replica.folder = folder
            finally:
                watch.is_excused = self._is_paused

        await asyncio.gather(*(self._on(replica, partial(take, replica)) for replica in self._replicas))

    async def _by_folder(self, client: SamplerClient, folder: Path, version: int) -> None:
        await self.provide(folder)
        await client.update_weights_from_disk(str(folder), version, flush_cache=self.forgets)

    async def versions(self) -> list[str]:
        """The weights that each sampler says it has."""
        infos = await asyncio.gather(*(self._on(r, lambda client: client.model_info()) for r in self._replicas))
        return [str(info["weight_version"]) for info in infos]

    async def fingerprints(self) -> list[list[dict[str, str]]]:
        """Of the weights that each sampler holds, by rank and tensor."""
        return await asyncio.gather(*(self._on(r, lambda client: client.fingerprints()) for r in self._replicas))

    def describe(self, number: int) -> str:
        """A sampler by name, for a message."""
        server = self._replicas[number].server
        return f"Sampler {number} (pid {server.pid}, {server.url})"

    def close(self) -> None:
        """End them all; none is started again."""
        self._is_closed = True
        if self._router is not None:
            self._router.close()
        for replica in self._replicas:
            replica.server.stop()

    async def disconnect(self) -> None:
        """Close the connections to all of them; the samplers go on."""
        await asyncio.gather(*(replica.watch.leave() for replica in self._replicas))
        await asyncio.gather(*(replica.client.close() for replica in self._replicas))
        if self._router is not None:
            await self._router.disconnect()

    async def _on(self, replica: Replica, call: Callable[[SamplerClient], Awaitable[T]]) -> T:
        """Call it on one sampler; again on the one that takes its place, when it is lost."""
        while True:
            await self._up(replica)
            server = replica.server
            try:
                return await self._watched(replica, call(replica.client))
            except SamplerLost as error:
                self._lost(replica, server, error)

    async def _choose(self) -> Replica:
        """The one with the fewest under way; waits while all are being started again."""
        while True:
            for replica in self._replicas:
                if replica.restart is not None and replica.restart.done():
                    await self._up(replica)
            if up := [replica for replica in self._replicas if replica.is_up]:
                return min(up, key=lambda replica: replica.load)
            restarts = [replica.restart for replica in self._replicas if replica.restart is not None]
            await asyncio.wait(restarts, return_when=asyncio.FIRST_COMPLETED)

    async def _up(self, replica: Replica) -> None:
        """Wait until it is up. Raises SamplerLost when it cannot be started again."""
        while replica.restart is not None:
            await asyncio.shield(replica.restart)

    def _lost(self, replica: Replica, server: ChildServer, error: SamplerLost) -> None:
        """Begin to replace a server that was lost, unless that has begun. Raises when it is lost too often."""
        if server is not replica.server or replica.restart is not None:
            return
        if self._is_stopping() or self._is_closed:
            raise error
        self._count_loss(replica, error)
        log.warning("%s was lost and is started again: %s", self.describe(replica.number), error)
        replica.restart = replacing = asyncio.ensure_future(self._replace(replica))
        self._replacing.add(replacing)  # asyncio keeps no task by itself
        replacing.add_done_callback(self._replacing.discard)
        replacing.add_done_callback(_retrieved)

    def _noticed(self, replica: Replica, server: ChildServer, error: SamplerLost) -> None:
        """The same for who has nobody to raise to: whoever needs the sampler next meets the error."""
        try:
            self._lost(replica, server, error)
        except SamplerLost as final:
            replica.restart = asyncio.get_running_loop().create_future()
            replica.restart.set_exception(final)
            replica.restart.exception()  # asyncio is not to complain if nobody does

    def _count_loss(self, replica: Replica, error: SamplerLost) -> None:
        replica.lost_in_a_row += 1
        if replica.lost_in_a_row > self._max_restarts:
            raise SamplerLost(
                f"{self.describe(replica.number)} was lost {replica.lost_in_a_row} times without having answered in "
                f"between: {error}. The end of its log:\n{replica.server.last_log_lines()}"
            ) from error

    async def _replace(self, replica: Replica) -> None:
        """Start a server in a lost one's place, with the current weights."""
        await replica.watch.leave()
        replica.server.kill()
        await replica.client.close()
        await self._rearrange()
        while True:
            model, version = self._model, self._version
            await self.provide(model)
            if model != self._model:  # they are to have others by now
                continue
            try:
                server = await in_thread(partial(self._launch, replica.number, model, version))
            except SamplerLost as error:
                self._count_loss(replica, error)
                continue
            break
        if self._is_closed:
            server.stop()
            raise SamplerLost("the stage is ending")
        self._take_up(replica, server, model)
        self.num_restarts += 1
        log.info("%s is up again, with weights %d", self.describe(replica.number), version)
        if self._is_paused:
            with suppress(SamplerLost):  # then whoever asks it next meets it
                await self._pause_one(replica, replica.client)
            if not self._is_paused:  # any more
                await self._resume(replica)
        replica.restart = None
        await self._rearrange()

    async def _rearrange(self) -> None:
        if self._router is not None:
            self._router.disarrange()
            with suppress(SamplerLost):  # whoever generates next meets it
                await self._router.arrange()

    async def _watched(self, replica: Replica, work: Awaitable[T]) -> T:
        """The result of a call; as long as one is under way the sampler's health is looked at."""
        result = await replica.watch.over(work)
        replica.lost_in_a_row = 0
        return result

    def _take_up(self, replica: Replica, server: ChildServer, folder: Path) -> None:
        """Note that a server, which has a folder's weights, is this sampler's."""
        replica.server, replica.client, replica.folder = server, self._connect(server.url), folder
        replica.watch = ServerWatch(
            server,
            replica.client,
            every_s=self._health_every_s,
            timeout_s=self._health_timeout_s,
            on_end=partial(self._noticed, replica, server),
        )


def _of_attempt(request: Request, attempt: int) -> Request:
    if request.rid is None or attempt == 0:
        return request
    return replace(request, rid=f"{request.rid}-attempt-{attempt + 1}")


async def _nothing(folder: Path) -> None:
    pass


def _retrieved(task: "asyncio.Task[None]") -> None:
    """Its error is met by whoever needs the sampler next; asyncio is not to complain if nobody does."""
    if not task.cancelled():
        task.exception()
