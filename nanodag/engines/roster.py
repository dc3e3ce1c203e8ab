"""The engines of a fleet: which of them are up, and how one that was lost comes back. No torch here.

An engine that is awaited is started again at once, and who needs it waits; lost too often, it ends the fleet. Any other
is left out while it is away, holds nobody up, is tried ever more seldom, and takes the current weights before it is
asked.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nanodag.engines.external import ExternalReplica, ExternalServers
from nanodag.engines.replica import Replica, WeightsFolder
from nanodag.engines.start import ServerProcess
from nanodag.engines.watch import AnyServer, ServerWatch
from nanodag.errors import SamplerError, SamplerLost
from nanodag.host.ports import allow_many_sockets
from nanodag.host.threads import cancelled
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import PauseMode

log = logging.getLogger(__name__)

Launch = Callable[[int, Path, Any], ServerProcess]
"""launch(number, model folder, version): a server that answers. Blocks; raises SamplerLost with the end of the log."""
Give = Callable[[SamplerClient, Path, Any], Awaitable[None]]


@dataclass(eq=False)
class Roster:
    """Engines of one set of weights, as they come and go.

    servers: running ones, with the weights of model and version. launch: starts one; connect: a client of it. name: of
    an engine, for messages. is_stopping: true once a stop was asked for; then nothing is started again.

    max_restarts: so many times in a row may one be lost, and may one prompt lose its engine; it is waited for where all
    are being started again. None: they are started again for ever, nobody waits, and a prompt is asked once more.

    health_every_s, health_timeout_s: how often an engine that has something under way (is_watched_idle: any) is asked
    for its health, and how long it may take to answer.

    pause: what becomes of requests that are under way when weights come; None to wait for them. external: servers of
    others; None for none. check: raises BadRequest for weights of another shape, which an engine that starts would not
    notice.

    provide: awaited with a folder of weights that one is about to be started with, or to take. give: awaited with a
    client, a folder and its version, gives one the weights, also one that came back; raises SamplerError.
    """

    servers: InitVar[Sequence[ServerProcess]] = ()
    _: KW_ONLY
    model: InitVar[Path]
    version: InitVar[Any]
    launch: Launch
    connect: Callable[[str], SamplerClient]
    name: str = "Sampler"
    max_restarts: int | None = 3
    is_stopping: Callable[[], bool] = lambda: False
    health_every_s: float = 5.0
    health_timeout_s: float = 60.0
    is_watched_idle: bool = False
    pause: PauseMode | None = None
    external: ExternalServers | None = None
    check: Callable[[Path], object] = lambda folder: None

    def __post_init__(self, servers: Sequence[ServerProcess], model: Path, version: Any) -> None:
        allow_many_sockets()
        self.replicas: list[Replica] = []
        self.current = WeightsFolder(model, version)
        self.num_restarts, self._num_looks = 0, 0
        self.provide: Callable[[Path], Awaitable[None]] = _nothing
        self.give: Give = self._give_by_folder
        self._is_paused = self._is_closed = False
        self._have_all_been_tried = self.external is None  # at first, each external server that is named is waited for
        # What a stage's samplers start with is for nobody: its first weights are still to come.
        self._has_weights, self._may_give = asyncio.Event(), asyncio.Event()
        self._may_give.set()
        if self.external is None:
            self._has_weights.set()
        self._giving: set[asyncio.Future[None]] = set()
        self._closing: set[asyncio.Future[None]] = set()
        self._holder: dict[str, Replica] = {}  # of each request under way
        self.add(servers)

    def add(self, servers: Sequence[ServerProcess]) -> None:
        """Take up servers that run and have the current weights."""
        for server in servers:
            replica = Replica(len(self.replicas), self)
            self.replicas.append(replica)
            self._take_up(replica, server, self.connect(server.url), self.current)

    def _take_up(self, replica: Replica, server: AnyServer, client: SamplerClient, weights: WeightsFolder) -> None:
        """Note that a server, which has these weights, is this engine's."""
        replica.server, replica.client = server, client
        replica.folder, replica.version = weights.folder, weights.version
        client.begins_with(weights.folder, weights.version)
        replica.released = set()
        replica.is_here = True
        replica.was_tried.set()
        replica.watch = ServerWatch(
            server,
            client,
            every_s=self.health_every_s,
            timeout_s=self.health_timeout_s,
            must_answer=replica.must_answer,
            on_end=partial(self.noticed, replica, server),
        )
        if self.is_watched_idle:
            replica.watch.begin()

    @property
    def here(self) -> list[Replica]:
        """Engines that there are servers of, up or not."""
        return [replica for replica in self.replicas if replica.is_here]

    @property
    def up(self) -> list[Replica]:
        """Engines that may be asked."""
        return [replica for replica in self.replicas if replica.is_up and replica.server.is_alive]

    async def choose(self, *, but: Replica | None = None) -> Replica:
        """The one with the fewest under way; waits while all are being started again. but: not this one, if there is
        another. Raises SamplerLost where none is up and none is waited for."""
        began = time.monotonic()
        while True:
            self.arrange()
            for replica in self.replicas:
                if replica.is_awaited and replica.has_failed:
                    await replica.until_up()
            if self.replicas:  # each in its turn, so that one that died idle is not left
                self._num_looks += 1
                self._see_whether_it_lives(self.replicas[self._num_looks % len(self.replicas)])
            if not (up := [replica for replica in self.replicas if replica.is_up]):
                await self.one_more(began)
                continue
            least = min(up, key=lambda replica: (replica is but, replica.load))
            if self._see_whether_it_lives(least):  # asked of all, a system call each would be what a request costs
                return least

    def _see_whether_it_lives(self, replica: Replica) -> bool:
        """Begin to replace one that is up and has ended."""
        if is_dead := replica.is_up and not replica.server.is_alive:
            self.noticed(replica, replica.server, SamplerLost(f"the server at {replica.server.url} has ended"))
        return not is_dead

    async def one_more(self, began: float) -> None:
        """Return when one more may be up. Raises SamplerLost when none comes, or it is not waited for."""
        for replica in self.replicas:
            if replica.has_failed:
                await replica.until_up()
        waits = [replica.restart for replica in self.replicas if replica.restart is not None]
        if not any(replica.is_awaited for replica in self.replicas):
            if self.external is None:
                raise SamplerLost(f"no engine of {self.name} is up")
            if time.monotonic() - began > self.external.patience_s:
                raise self.external.why_none()
        if self.external is not None:
            waits.append(asyncio.ensure_future(asyncio.sleep(self.external.every_s)))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self.external is not None:
            waits[-1].cancel()

    def arrange(self) -> None:
        """Begin with external servers that are newly named; those that are named no more get no more prompts."""
        if self.external is None or self._is_closed:
            return
        known = {replica.url for replica in self.replicas if isinstance(replica, ExternalReplica)}
        for url in [url for url in self.external.named() if url not in known]:
            replica = ExternalReplica(len(self.replicas), self, url, self.external)
            self.replicas.append(replica)
            replica.begin(self._come_back(replica))
        for unnamed in [replica for replica in self.up if self._may_give.is_set() and not replica.is_named]:
            log.info("%s is no longer named: it gets no more prompts.", unnamed.name)
            unnamed.is_here = False
            unnamed.begin(self._come_back(unnamed, is_well=True))

    def lost(self, replica: Replica, server: AnyServer, error: SamplerError) -> None:
        """Begin to replace a server that was lost, unless that has begun. Raises it where the fleet ends, SamplerLost
        where it was lost too often."""
        is_coming = replica.restart is not None
        if server is not replica.server or (is_coming and (replica.is_awaited or not replica.is_here)):
            return
        if self.is_stopping() or self._is_closed:
            raise error
        replica.lost_in_a_row += 1
        replica.went(error)
        if not replica.is_awaited:
            replica.is_here = False
            server.kill()
            closing = asyncio.ensure_future(replica.client.close())  # ends what it was asked
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if not is_coming:  # else it was about to come back, and sees that it may not
            replica.begin(self._come_back(replica))

    def noticed(self, replica: Replica, server: AnyServer, error: SamplerError) -> None:
        """The same for who has nobody to raise to: whoever needs the engine next meets the error."""
        try:
            self.lost(replica, server, error)
        except SamplerError as final:
            replica.fail(final)

    async def _come_back(self, replica: Replica, *, is_well: bool = False) -> None:
        """Have it among the engines as soon as that can be. is_well: what it was asked it answers first."""
        try:
            while is_well and replica.load and replica.server.is_alive:
                await asyncio.sleep(self.health_every_s / 4)
            attempt = replica.lost_in_a_row
            await replica.disconnect()
            while True:
                await asyncio.sleep(replica.pause_s(attempt))
                attempt = attempt + 1 if replica.is_named else 1
                if replica.is_named:
                    try:
                        return await self._open(replica)
                    except SamplerError as error:
                        if replica.restart is not asyncio.current_task():
                            return
                        if self._is_closed:
                            raise
                        replica.lost_in_a_row += replica.is_awaited
                        replica.went(error)
                        replica.is_here = replica.is_awaited
                replica.was_tried.set()
                await replica.disconnect()
        finally:
            replica.was_tried.set()

    async def _open(self, replica: Replica) -> None:
        """Have a server, and it up. Raises SamplerError when that cannot be, or it is lost meanwhile."""
        server, client, weights = await replica.open(self.current)
        if self._is_closed:
            await client.close()
            server.stop()
            raise SamplerLost("the stage is ending")
        self._take_up(replica, server, client, weights)
        self.num_restarts += replica.is_own
        if replica.is_awaited:  # in another's place, and not up yet
            if self._is_paused:
                with suppress(SamplerLost):  # then whoever asks it next meets it
                    await self._pause_one(replica, replica.client)
                if not self._is_paused:  # any more
                    await self._resume(replica)
            self.has_come(replica)
        else:
            await self._take_current(replica)

    async def _take_current(self, replica: Replica) -> None:
        """Give it the current weights, unless who is in charge of them does; then it is up."""
        server, client = replica.server, replica.client
        await self._has_weights.wait()
        while True:
            while not self._may_give.is_set():
                await self._may_give.wait()
            if replica.restart is not asyncio.current_task():  # who was in charge gave it the weights
                return
            if not server.is_alive:
                raise SamplerLost("it was lost while it took weights")
            folder, version = self.current.folder, self.current.version
            if replica.folder == folder:
                replica.version = version
                return self.has_come(replica)
            replica.watch.is_excused = True
            giving = asyncio.ensure_future(replica.watch.over(self.give(client, folder, version)))
            self._giving.add(giving)
            giving.add_done_callback(self._giving.discard)
            try:
                await giving
                replica.folder, replica.version = folder, version
                await replica.held_version(client)
            except SamplerError:
                if folder == self.current.folder:
                    raise  # else the folder may be gone: it is to have others by now
            finally:
                replica.watch.is_excused = False

    @property
    def forgets(self) -> bool:
        """True when the engines forget prompts when weights come: SGLang cannot in the midst of requests."""
        return self.pause != "in_place"

    async def _give_by_folder(self, client: SamplerClient, folder: Path, version: Any) -> None:
        await self.provide(folder)
        was_away = any(replica.client is client and not replica.is_up for replica in self.here)
        await client.update_weights_from_disk(str(folder), version, flush_cache=self.forgets or was_away)

    def has_come(self, replica: Replica) -> None:
        """Note that one which has the current weights is up, unless it was."""
        if not replica.is_up:
            replica.restart = None
            replica.came()

    async def _pause_one(self, replica: Replica, client: SamplerClient) -> None:
        assert self.pause is not None
        replica.watch.is_excused = True
        await client.pause(self.pause)

    async def _resume(self, replica: Replica) -> None:
        server = replica.server
        try:
            await replica.client.resume()
        except replica.faults as error:
            self.noticed(replica, server, error)
        replica.watch.is_excused = False

    def have_weights(self, folder: Path, version: Any) -> None:
        """Have every engine that is started again, or comes back, from now on begin with these weights."""
        self.current.folder, self.current.version = folder, version
        self._has_weights.set()

    async def hold_back(self) -> None:
        """Return when none takes weights by itself, and none will until _may_give is set again."""
        self._may_give.clear()
        await asyncio.gather(*self._giving, return_exceptions=True)

    def close(self) -> None:
        """End them all; none is started again."""
        self._is_closed = True
        for replica in self.here:
            replica.server.stop()

    async def disconnect(self) -> None:
        """Close the connections to all of them; the servers go on. None that is left out comes back any more."""
        await cancelled(*(r.restart for r in self.replicas if r.restart is not None and not r.is_awaited))
        await asyncio.gather(*self._closing, return_exceptions=True)
        replicas = [replica for replica in self.replicas if hasattr(replica, "client")]
        await asyncio.gather(*(replica.watch.leave() for replica in replicas))
        await asyncio.gather(*(replica.client.close() for replica in replicas))


async def _nothing(folder: Path) -> None:
    pass
