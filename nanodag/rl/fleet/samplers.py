"""Several samplers of the same weights behind one client, kept alive. No torch here.

A sampler that dies, or that does not answer for a while and is then killed, is started again with the current weights;
what it was asked is asked of another one meanwhile. Who answers a prompt does not show when the samplers are
deterministic: its seed and the weights decide the tokens. A sampler that is lost again and again ends the stage.

Servers that somebody else runs (nanodag.rl.fleet.attached) are among them while they answer and have the current
weights. One that is lost is left out, is asked for nothing, and holds nobody up; when it answers again it takes the
weights first. It never ends the stage, unless no sampler is left.

A stage's loop may stop between two calls: the samplers then go on, and what happened to them is met at the next call.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nanodag.errors import BadRequest, SamplerError, SamplerLost
from nanodag.errors.words import counted
from nanodag.host.threads import in_thread
from nanodag.inference.addresses import Address
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import Completion, MemoryTag, PauseMode, Request
from nanodag.rl.fleet.attached import Attachments, check_answers
from nanodag.rl.fleet.router import Router
from nanodag.rl.fleet.server_watch import ChildServer, ServerWatch

log = logging.getLogger(__name__)
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
NO_WEIGHTS = Path()
"""The folder of weights that a sampler lost with its memory."""
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

    folder, version: of the weights that it has. lost_in_a_row: times that it was lost without having answered anything
    in between. released: memory that its server has given back; one that takes its place has all of it. url: of a
    server that somebody else runs, "" for one of ours; is_here: whether there is a server, which of somebody else's is
    more than to answer: it fits.
    """

    server: ChildServer
    client: SamplerClient
    watch: ServerWatch
    folder: Path
    version: int

    def __init__(self, number: int, url: str = "") -> None:
        self.number, self.url = number, url
        self.load = 0
        self.lost_in_a_row = 0
        self.released: set[MemoryTag] = set()
        self.restart: asyncio.Future[None] | None = None
        self.is_here = not url
        self.was_tried = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self.restart is None


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
        self._model, self._version = model, version
        self._replicas = [Replica(number) for number in range(len(servers))]
        for replica, server in zip(self._replicas, servers, strict=True):
            self._take_up(replica, server, model, version)
        self._attachments = attachments
        self._has_all_tried = False
        self._has_news = asyncio.Event()  # weights to give to who comes back: what samplers start with is for nobody
        self._may_give = asyncio.Event()
        self._may_give.set()
        self._giving: set[asyncio.Future[None]] = set()
        self._closing: set[asyncio.Future[None]] = set()
        self._router = router
        if router is not None:
            router.urls = lambda: [r.server.url for r in self._replicas if r.is_up and r.server.is_alive]
        self._replacing: set[asyncio.Task[None]] = set()
        self._holder: dict[str, Replica] = {}
        self._sent: dict[str, str] = {}  # rid -> the name under which the router has it
        self._is_closed = False
        self.provide: Callable[[Path], Awaitable[None]] = _nothing
        self.give: Callable[[SamplerClient, Path, int], Coroutine[Any, Any, None]] = self._give_by_folder
        self.num_restarts = 0

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """For each prompt its `params.n` completions."""
        if self._router is not None:
            return await self._through(self._router, requests)
        load = sum(request.params.n for request in requests)
        rids = [request.rid for request in requests if request.rid is not None]
        attempts = self._max_restarts + 1 + sum(bool(replica.url) for replica in self._replicas)
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
                answers = await self._watched(replica, replica.client.generate(requests))
                if replica.url:
                    check_answers(requests, answers, versions=range(had, self._version + 1))
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
                with suppress(SamplerError if replica.url else SamplerLost):  # then it has ended
                    await self._watched(replica, replica.client.abort(sent))

    async def members(self) -> list[Member]:
        """All of them, when all have answered; servers of others that are here. They are to be given weights: none that
        comes back takes any by itself until `paused` has ended."""
        await self._no_more_given()
        await self._on_each(lambda replica, client: client.model_info())
        return [Member(replica.number, replica.server, replica.client) for replica in self._here]

    def are_to_have(self, folder: Path, version: int) -> None:
        """Have every sampler that is started again, or comes back, from now on begin with these weights."""
        self._model, self._version = folder, version
        self._has_news.set()

    def now_have(self, members: Sequence[Member]) -> None:
        """Note that these have the weights that all are to have; one that was started in the place of such a member
        has what it was started with."""
        have = {id(member.server) for member in members}
        for replica in self._replicas:
            if replica.is_here and id(replica.server) in have:
                self._has_current(replica)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Inside, who is in charge changes weights, and no server of others that comes back takes any by itself.

        Nothing is sampled: requests in flight are paused, or were ended; also by one that is started again meanwhile.
        Not without `pause`: then who changes weights waits for them."""
        try:
            await self._no_more_given()
            async with self._all_paused():
                yield
        finally:
            self._may_give.set()

    async def _no_more_given(self) -> None:
        self._may_give.clear()
        await asyncio.gather(*self._giving, return_exceptions=True)

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
            await asyncio.gather(*(self._resume(replica) for replica in self._replicas if replica.is_up))

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
        await self._on_each(self._take)

    async def _take(self, replica: Replica, client: SamplerClient) -> None:
        if replica.folder == self._model:
            return
        server, watch = replica.server, replica.watch
        watch.is_excused = True
        try:
            await self.give(client, self._model, self._version)
            if server is replica.server and replica.is_here:
                self._has_current(replica)
        finally:
            watch.is_excused = self._is_paused

    async def start_profile(self, folder: Path) -> None:
        """Begin a trace of every sampler, into a folder for each below this one."""

        async def start(replica: Replica, client: SamplerClient) -> None:
            own = folder / f"sampler-{replica.number}"
            own.mkdir(parents=True, exist_ok=True)
            await client.start_profile(own)

        await self._on_each(start, are_up=True)

    async def stop_profile(self) -> None:
        """End the traces, and have them written. Raises BadRequest where one was started again meanwhile."""
        await self._on_each(lambda replica, client: client.stop_profile(), are_up=True)

    async def release_memory(self) -> None:
        """Have every sampler give its memory back; nothing may be in flight. What was in it is lost."""
        await self._on_each(self._release)

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Have every sampler take memory again that it gave back; one that was started meanwhile has it."""
        await self._on_each(lambda replica, client: self._take_memory(replica, tags, client))

    async def _release(self, replica: Replica, client: SamplerClient) -> None:
        tags = [tag for tag in MEMORY_TAGS if tag not in replica.released]
        replica.watch.may_generate = False
        if tags:
            await client.release_memory(tags)
        replica.released.update(tags)

    async def _take_memory(self, replica: Replica, tags: Sequence[MemoryTag], client: SamplerClient) -> None:
        if given := [tag for tag in tags if tag in replica.released]:
            await client.resume_memory(given)
        if "weights" in given:
            replica.folder = NO_WEIGHTS
        replica.released.difference_update(given)
        replica.watch.may_generate = not replica.released

    async def memory(self) -> list[dict[str, int]]:
        """What those that are up say that they hold (`SamplerClient.memory`). Who does not answer is met by others."""
        asked = [replica.client.memory() for replica in self._replicas if replica.is_up]
        found = await asyncio.gather(*asked, return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, SamplerError):
                raise error
        return [each for each in found if isinstance(each, dict)]

    async def versions(self) -> list[str]:
        """The weights that each sampler says it has."""
        return list((await self._on_each(self._version_there, are_up=True)).values())

    async def _version_there(self, replica: Replica, client: SamplerClient) -> str:
        version = str((await client.model_info()).get("weight_version"))
        if replica.url and version != str(replica.version):
            raise SamplerLost(f"it says that it has weights {version}, and was given {replica.version}")
        return version

    async def fingerprints(self) -> list[list[dict[str, str]]]:
        """Of the weights that each sampler holds, by rank and tensor; no rank of one that is left out."""
        found = await self._on_each(lambda replica, client: client.fingerprints(), are_up=True)
        return [found.get(replica, []) for replica in self._replicas]

    def describe(self, number: int) -> str:
        """A sampler by name, for a message."""
        replica = self._replicas[number]
        return f"Sampler {number} ({replica.url or f'pid {replica.server.pid}, {replica.server.url}'})"

    def close(self) -> None:
        """End them all; none is started again."""
        self._is_closed = True
        if self._router is not None:
            self._router.close()
        for replica in self._replicas:
            if replica.is_here:
                replica.server.stop()

    async def disconnect(self) -> None:
        """Close the connections to all of them; the samplers go on."""
        returning = [replica.restart for replica in self._replicas if replica.url and replica.restart is not None]
        for task in returning:
            task.cancel()
        await asyncio.gather(*returning, *self._closing, return_exceptions=True)
        replicas = [replica for replica in self._replicas if hasattr(replica, "client")]
        await asyncio.gather(*(replica.watch.leave() for replica in replicas))
        await asyncio.gather(*(replica.client.close() for replica in replicas))
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

    async def _on_each(
        self, call: Callable[[Replica, SamplerClient], Awaitable[T]], *, are_up: bool = False
    ) -> dict[Replica, T]:
        """Call it on every sampler, as `_on`, and on every server of others that is here, or up, of which one that is
        lost meanwhile is left out. Waits until there is one."""
        began = time.monotonic()
        while True:
            self._arrange()
            if self._attachments is not None and not self._has_all_tried:
                await asyncio.gather(*(replica.was_tried.wait() for replica in self._replicas if replica.url))
                self._has_all_tried = True
            if are_up and not self._may_give.is_set():  # in the midst of a sync: who came back gets its weights here
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
            return (await self._watched(replica, call(replica, replica.client)),)
        except SamplerError as error:
            self._lost(replica, server, error)
            return None

    async def _choose(self) -> Replica:
        """The one with the fewest under way; waits while all are being started again."""
        began = time.monotonic()
        while True:
            self._arrange()
            for replica in self._replicas:
                if replica.restart is not None and replica.restart.done():
                    await self._up(replica)
            if up := [replica for replica in self._replicas if replica.is_up]:
                return min(up, key=lambda replica: replica.load)
            await self._one_more(began)

    async def _one_more(self, began: float) -> None:
        """Return when one more may be up. Raises SamplerLost when there are servers of others alone, and none has been
        up since a time for as long as they are waited for."""
        restarts = [replica.restart for replica in self._replicas if replica.restart is not None]
        if self._attachments is None:
            await asyncio.wait(restarts, return_when=asyncio.FIRST_COMPLETED)
            return
        is_over = time.monotonic() - began > self._attachments.patience_s
        if is_over and all(replica.url for replica in self._replicas):
            raise self._attachments.why_none()
        came = [asyncio.ensure_future(asyncio.sleep(self._attachments.every_s)), *restarts]
        await asyncio.wait(came, return_when=asyncio.FIRST_COMPLETED)
        came[0].cancel()

    @property
    def _here(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.is_here]

    async def _up(self, replica: Replica) -> None:
        """Wait until it is up. Raises SamplerLost when it cannot be started again."""
        while replica.restart is not None:
            await asyncio.shield(replica.restart)

    def _lost(self, replica: Replica, server: ChildServer, error: SamplerError) -> None:
        """Begin to replace a server that was lost, unless that has begun. Raises when it is lost too often. One of
        others is left out."""
        if server is not replica.server or (replica.restart is not None and not (replica.url and replica.is_here)):
            return
        if self._is_stopping() or self._is_closed:
            raise error
        if replica.url:
            self._leave_out(replica, error)
            return
        self._count_loss(replica, error)
        log.warning("%s was lost and is started again: %s", self.describe(replica.number), error)
        self._begin(replica, self._replace(replica))

    def _begin(self, replica: Replica, replacing: Coroutine[Any, Any, None]) -> None:
        replica.restart = task = asyncio.ensure_future(replacing)
        self._replacing.add(task)  # asyncio keeps no task by itself
        task.add_done_callback(self._replacing.discard)
        task.add_done_callback(_retrieved)

    def _noticed(self, replica: Replica, server: ChildServer, error: SamplerError) -> None:
        """The same for who has nobody to raise to: whoever needs the sampler next meets the error."""
        try:
            self._lost(replica, server, error)
        except SamplerError as final:
            replica.restart = asyncio.get_running_loop().create_future()
            replica.restart.set_exception(final)
            replica.restart.exception()  # asyncio is not to complain if nobody does

    def _count_loss(self, replica: Replica, error: SamplerError) -> None:
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
        self._take_up(replica, server, model, version)
        self.num_restarts += 1
        log.info("%s is up again, with weights %d", self.describe(replica.number), version)
        if self._is_paused:
            with suppress(SamplerLost):  # then whoever asks it next meets it
                await self._pause_one(replica, replica.client)
            if not self._is_paused:  # any more
                await self._resume(replica)
        replica.restart = None
        await self._rearrange()

    # Servers that somebody else runs

    def _arrange(self) -> None:
        """Begin with servers that are newly named; those that are named no more get no more prompts."""
        if self._attachments is None or self._is_closed:
            return
        named = self._attachments.named()
        known = {replica.url for replica in self._replicas}
        for url in [url for url in named if url not in known]:
            self._replicas.append(replica := Replica(len(self._replicas), url))
            self._begin(replica, self._come_back(replica))
        for replica in self._here if self._may_give.is_set() else ():
            if replica.url and replica.url not in named and replica.is_up:
                log.info("%s is no longer named: it gets no more prompts.", self.describe(replica.number))
                replica.is_here = False
                self._begin(replica, self._come_back(replica, is_well=True))

    def _leave_out(self, replica: Replica, error: SamplerError) -> None:
        assert self._attachments is not None
        self._attachments.note(replica.url, error)
        replica.lost_in_a_row += 1
        replica.is_here = False
        replica.server.kill()
        closing = asyncio.ensure_future(replica.client.close())  # ends what it was asked
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        if replica.restart is None:  # else it was about to come back, and sees that it may not
            self._begin(replica, self._come_back(replica))

    async def _come_back(self, replica: Replica, *, is_well: bool = False) -> None:
        """Have it among the samplers as soon as it is named, fits and has the current weights. is_well: what it was
        asked it answers first."""
        attachments = self._attachments
        assert attachments is not None
        try:
            while is_well and replica.load and replica.server.is_alive:
                await asyncio.sleep(attachments.every_s)
            attempt = replica.lost_in_a_row
            while True:
                await self._disconnected(replica)
                if attempt:
                    await asyncio.sleep(min(attachments.every_s * 2.0 ** min(attempt - 1, 16), attachments.longest_s))
                address = attachments.named().get(replica.url)
                attempt = 1 if address is None else attempt + 1
                if address is not None:
                    try:
                        await self._attach(attachments, address, replica)
                        return
                    except SamplerError as error:
                        if replica.restart is not asyncio.current_task():
                            return
                        attachments.note(replica.url, error)
                        replica.is_here = False
                replica.was_tried.set()
        finally:
            replica.was_tried.set()

    async def _disconnected(self, replica: Replica) -> None:
        """Have no connection to the server that it was."""
        if hasattr(replica, "server"):
            replica.server.kill()
            await replica.watch.leave()
            await replica.client.close()

    async def _attach(self, attachments: Attachments, address: Address, replica: Replica) -> None:
        """Raises SamplerError when that cannot be, or it is lost meanwhile."""
        server, client = await attachments.attach(address)
        self._take_up(replica, server, Path(), self._version, client)
        replica.is_here = True
        replica.was_tried.set()
        await self._has_news.wait()
        while True:
            while not self._may_give.is_set():
                await self._may_give.wait()
            if replica.restart is not asyncio.current_task():  # who was in charge gave it the weights
                return
            if not server.is_alive:
                raise SamplerLost("it was lost while it took weights")
            folder, version = self._model, self._version
            if replica.folder == folder:
                return self._has_current(replica)
            replica.watch.is_excused = True
            giving = asyncio.ensure_future(replica.watch.over(self.give(client, folder, version)))
            self._giving.add(giving)
            giving.add_done_callback(self._giving.discard)
            try:
                await giving
                replica.folder, replica.version = folder, version
                await self._version_there(replica, client)
            except SamplerError:
                if folder == self._model:
                    raise  # else the folder may be gone: it is to have others by now
            finally:
                replica.watch.is_excused = False

    async def _give_by_folder(self, client: SamplerClient, folder: Path, version: int) -> None:
        await self.provide(folder)
        was_away = any(replica.client is client and not replica.is_up for replica in self._replicas)
        await client.update_weights_from_disk(str(folder), version, flush_cache=self.forgets or was_away)

    def _has_current(self, replica: Replica) -> None:
        """Note that it has the weights that all are to have; a server of others is up then."""
        replica.folder, replica.version = self._model, self._version
        if replica.url and not replica.is_up:
            assert self._attachments is not None
            self._attachments.note(replica.url, None)
            replica.restart = None
            log.info("%s takes part, with weights %d", self.describe(replica.number), self._version)

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
