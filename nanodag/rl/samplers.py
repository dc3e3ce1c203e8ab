"""Several samplers of the same weights behind one client, kept alive. No torch here.

A sampler that dies, or that does not answer for a while and is then killed, is started again with the current weights;
what it was asked is asked of another one meanwhile. Who answers a prompt does not show when the samplers are
deterministic: its seed and the weights decide the tokens. A sampler that is lost again and again ends the stage.

A stage's loop may stop between two calls: the samplers then go on, and what happened to them is met at the next call.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from nanodag.errors import SamplerLost
from nanodag.sampler.client import SamplerClient
from nanodag.sampler.protocol import Completion, Request

log = logging.getLogger(__name__)
T = TypeVar("T")


class Server(Protocol):
    """A sampler's server as a child process."""

    url: str

    @property
    def pid(self) -> int: ...

    def last_log_lines(self) -> str:
        """The end of its log."""
        ...

    def stop(self) -> None:
        """Ask it to end, then make it."""
        ...

    def kill(self) -> None:
        """Make it end at once."""
        ...


Launch = Callable[[int, Path, int], Server]
"""launch(number, model folder, version): a server that answers. Blocks; raises SamplerLost with the end of the log."""


@dataclass(frozen=True)
class Member:
    """A sampler as it is now: another server in its place is another member."""

    number: int
    server: Server
    client: SamplerClient


class Replica:
    """One sampler: its server, and what is under way there.

    folder: of the weights that it has. lost_in_a_row: times that it was lost without having answered anything in
    between.
    """

    def __init__(self, number: int, server: Server, client: SamplerClient, folder: Path) -> None:
        self.number = number
        self.server = server
        self.client = client
        self.folder = folder
        self.load = 0
        self.takes_weights = False
        self.lost_in_a_row = 0
        self.restart: asyncio.Task[None] | None = None
        self.num_calls = 0
        self.monitor: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self.restart is None


class Samplers:
    """Sends each prompt to the sampler with the fewest under way, and new weights to all.

    servers: running ones. model, version: what they were started with. launch: starts one again; connect: a client of
    it. is_stopping: true once a stop was asked for; then nothing is started again. health_every_s, health_timeout_s:
    how often a sampler that has something under way is asked for its health, and how long it may take to answer.
    most_losses: so many times in a row may one be lost, and may one prompt lose its sampler.

    before_launch: awaited with the folder that one is about to be started with.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        model: Path,
        version: int,
        launch: Launch,
        connect: Callable[[str], SamplerClient],
        is_stopping: Callable[[], bool] = lambda: False,
        health_every_s: float = 5.0,
        health_timeout_s: float = 60.0,
        most_losses: int = 3,
    ) -> None:
        self._launch = launch
        self._connect = connect
        self._is_stopping = is_stopping
        self._health_every_s, self._health_timeout_s = health_every_s, health_timeout_s
        self._most_losses = most_losses
        self._model, self._version = model, version
        self._replicas = [Replica(n, server, connect(server.url), model) for n, server in enumerate(servers)]
        self._holder: dict[str, Replica] = {}
        self._is_closed = False
        self.before_launch: Callable[[Path], Awaitable[None]] = _nothing
        self.num_restarts = 0

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """For each prompt its `params.n` completions."""
        load = sum(request.params.n for request in requests)
        rids = [request.rid for request in requests if request.rid is not None]
        for attempt in range(self._most_losses + 1):
            replica = await self._choose()
            server = replica.server
            self._holder.update(dict.fromkeys(rids, replica))
            replica.load += load
            try:
                return await self._watched(replica, replica.client.generate(requests))
            except SamplerLost as error:
                self._lost(replica, server, error)
                if attempt == self._most_losses:
                    raise SamplerLost(
                        f"A prompt lost {attempt + 1} samplers, one after the other; the last: {error}. The end of its "
                        f"log:\n{server.last_log_lines()}"
                    ) from error
            finally:
                replica.load -= load
        raise AssertionError("unreachable")

    async def abort(self, rid: str) -> None:
        """End a request, if it is under way."""
        replica = self._holder.get(rid)
        if replica is None or not replica.is_up:  # it ended with its sampler
            return
        with suppress(SamplerLost):  # then it has ended
            await self._watched(replica, replica.client.abort(rid))

    async def members(self) -> list[Member]:
        """All of them, when all have answered."""
        await self.versions()
        return [Member(replica.number, replica.server, replica.client) for replica in self._replicas]

    def now_have(self, folder: Path, version: int) -> None:
        """Note that all have these weights, and that one that is started again is to be started with the folder."""
        self._model, self._version = folder, version
        self._holder.clear()
        for replica in self._replicas:
            replica.folder = folder

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Have every sampler take the weights in a folder, also where it has that version from another one. Returns
        when all have.

        What is under way is waited for. The folder must stay until the next call: a sampler that dies is started with
        it, and the embedded one compares what it holds with it.
        """
        folder = Path(path)
        self._model, self._version = folder, version
        self._holder.clear()

        async def take(replica: Replica, client: SamplerClient) -> None:
            if replica.folder != folder:  # one that was lost meanwhile has been started with it
                await client.update_weights_from_disk(path, version)

        async def bring_up_to_date(replica: Replica) -> None:
            replica.takes_weights = True
            try:
                await self._on(replica, lambda client: take(replica, client))
            finally:
                replica.takes_weights = False
            replica.folder = folder

        await asyncio.gather(*map(bring_up_to_date, self._replicas))

    async def versions(self) -> list[str]:
        """The weights that each sampler says it has."""
        found = await asyncio.gather(*(self._on(r, lambda client: client.model_info()) for r in self._replicas))
        return [str(info["weight_version"]) for info in found]

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
        for replica in self._replicas:
            replica.server.stop()

    async def disconnect(self) -> None:
        """Close the connections to all of them; the samplers go on."""
        await asyncio.gather(*(replica.client.close() for replica in self._replicas))

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
        if replica.restart is not None:
            await asyncio.shield(replica.restart)
            replica.restart = None

    def _lost(self, replica: Replica, server: Server, error: SamplerLost) -> None:
        """Begin to replace a server that was lost, unless that has begun. Raises when it is lost too often."""
        if server is not replica.server or replica.restart is not None:
            return
        if self._is_stopping() or self._is_closed:
            raise error
        self._count_loss(replica, error)
        log.warning("%s was lost and is started again: %s", self.describe(replica.number), error)
        replica.restart = asyncio.ensure_future(self._replace(replica))
        replica.restart.add_done_callback(_retrieved)

    def _count_loss(self, replica: Replica, error: SamplerLost) -> None:
        replica.lost_in_a_row += 1
        if replica.lost_in_a_row > self._most_losses:
            raise SamplerLost(
                f"{self.describe(replica.number)} was lost {replica.lost_in_a_row} times without having answered in "
                f"between: {error}. The end of its log:\n{replica.server.last_log_lines()}"
            ) from error

    async def _replace(self, replica: Replica) -> None:
        """Start a server in a lost one's place, with the current weights."""
        self._end_monitor(replica)
        replica.server.kill()
        await replica.client.close()
        while True:
            model, version = self._model, self._version
            await self.before_launch(model)
            try:
                server = await _in_thread(partial(self._launch, replica.number, model, version))
            except SamplerLost as error:
                self._count_loss(replica, error)
                continue
            break
        if self._is_closed:
            server.stop()
            return
        replica.server, replica.client, replica.folder = server, self._connect(server.url), model
        self.num_restarts += 1
        log.info("%s is up again, with weights %d", self.describe(replica.number), version)

    async def _watched(self, replica: Replica, work: Awaitable[T]) -> T:
        """The result of a call; as long as one is under way the sampler's health is looked at."""
        replica.num_calls += 1
        if replica.monitor is None or replica.monitor.done():  # done: it has killed the server
            replica.monitor = asyncio.ensure_future(self._monitor(replica))
        try:
            result = await work
            replica.lost_in_a_row = 0
            return result
        finally:
            replica.num_calls -= 1
            if replica.num_calls == 0:
                self._end_monitor(replica)

    def _end_monitor(self, replica: Replica) -> None:
        if replica.monitor is not None:
            replica.monitor.cancel()
            replica.monitor = None

    async def _monitor(self, replica: Replica) -> None:
        """Kill a server that does not answer, or says for as long that it cannot serve: what is under way there then
        fails at once. SGLang says so when its scheduler hangs; one that is paused to take weights may say so, too."""
        server, client, well = replica.server, replica.client, time.monotonic()
        while True:
            await asyncio.sleep(self._health_every_s)
            try:
                is_well = await asyncio.wait_for(client.health(), self._health_timeout_s)
            except SamplerLost:  # of this one question: what is under way may go on
                is_well = False
            except TimeoutError:
                is_well, well = False, -math.inf
            if is_well or replica.takes_weights:
                well = time.monotonic()
            elif time.monotonic() - well > self._health_timeout_s:
                log.warning("%s has not been well for %g s: killed", server.url, self._health_timeout_s)
                server.kill()
                return


async def _nothing(folder: Path) -> None:
    pass


async def _in_thread(call: Callable[[], T]) -> T:
    """The result of a call in a thread of its own, which nobody waits for when the process ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as found:  # noqa: BLE001 - the caller gets it
            error = found
        with suppress(RuntimeError):  # the loop may have been closed meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True).start()
    return await future


def _retrieved(task: "asyncio.Task[None]") -> None:
    """Its error is met by whoever needs the sampler next; asyncio is not to complain if nobody does."""
    if not task.cancelled():
        task.exception()
