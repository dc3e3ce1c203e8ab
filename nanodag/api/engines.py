"""Engine processes behind one model's name: the least busy one is asked, one that dies is started again."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

from nanodag.errors import BadRequest, SamplerError, SamplerLost
from nanodag.host.threads import in_thread
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import Completion, Request
from nanodag.inference.sampler_process import ServerProcess

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
HEALTH_EVERY_S = 5.0
UNWELL_S = 60.0  # an engine that does not answer for so long is ended
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0  # between two starts that fail

Launch = Callable[[int, Path, str], ServerProcess]


class _Replica:
    """One of them. load: answers that it works on."""

    def __init__(self, number: int, server: ServerProcess, client: SamplerClient) -> None:
        self.number, self.server, self.client = number, server, client
        self.load = 0
        self.is_up = True


class Engines:
    """A Backend (`served_model.py`) over `num_replicas` processes.

    launch(number, folder, version): starts one and blocks until it answers; raises SamplerLost with the end of its log.
    connect(url): a client of one. check(folder): raises BadRequest for weights of another shape, which an engine that
    starts would not notice. is_ending: whether the whole server is about to end, and its engines with it.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        version: str,
        *,
        num_replicas: int,
        launch: Launch,
        connect: Callable[[str], SamplerClient],
        check: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        self.name = name
        self._folder, self._version = folder, version
        self._num_replicas, self._launch, self._connect, self._check = num_replicas, launch, connect, check
        self._replicas: list[_Replica] = []
        self._tending: list[asyncio.Task[None]] = []
        self._num_restarts = 0
        self.is_ending: Callable[[], bool] = lambda: False

    async def start(self) -> None:
        """Start all at once. Raises SamplerLost when one cannot; the others then end with `close`."""

        async def begin(number: int) -> None:
            server = await in_thread(lambda: self._launch(number, self._folder, self._version))
            replica = _Replica(number, server, self._connect(server.url))
            self._replicas.append(replica)
            self._tending.append(asyncio.ensure_future(self._tend(replica)))

        await asyncio.gather(*(begin(number) for number in range(self._num_replicas)))

    async def close(self) -> None:
        """End them all."""
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)
        for replica in self._replicas:
            await replica.client.close()
            replica.server.stop()

    @property
    def is_ready(self) -> bool:
        return bool(self._up())

    @property
    def weight_version(self) -> str:
        return self._version

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    async def answer(self, request: Request, *, stream: bool) -> AsyncGenerator[Completion, None]:
        """See Backend. A request that meets an engine's end raises SamplerLost."""
        replica = self.least_busy()
        replica.load += 1
        try:
            if not stream:
                ((completion,),) = await replica.client.generate([request])
                yield completion
                return
            async with aclosing(replica.client.stream(request)) as parts:
                async for completion in parts:
                    yield completion
        finally:
            replica.load -= 1

    @property
    def load(self) -> int:
        """Answers under way, those that wait in an engine included."""
        return sum(replica.load for replica in self._replicas)

    def least_busy(self) -> _Replica:
        """Raises SamplerLost where none is up."""
        if not (up := self._up()):
            raise SamplerLost(f"no engine of {self.name} is up")
        return min(up, key=lambda replica: replica.load)

    def _up(self) -> list[_Replica]:
        return [replica for replica in self._replicas if replica.is_up and replica.server.is_alive]

    async def take_weights(self, folder: Path, version: str) -> None:
        """Have every engine answer with the weights in a folder, one engine after the other. Answers under way end on
        the weights that they began with.

        Raises BadRequest where they are of another architecture: the old ones stay.
        """
        self._check(folder)
        for replica in self._replicas:
            if replica.is_up:
                with suppress(SamplerLost):  # it is started again, with these weights
                    await replica.client.update_weights_from_disk(str(folder), version)
            self._folder, self._version = folder, version

    async def _tend(self, replica: _Replica) -> None:
        """As long as this lives, so does an engine."""
        well = looked = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now = time.monotonic()
            if replica.server.is_alive and now - looked >= HEALTH_EVERY_S:
                looked = now
                with suppress(SamplerError, TimeoutError):
                    async with asyncio.timeout(HEALTH_EVERY_S):
                        await replica.client.health()
                        well = time.monotonic()
                if time.monotonic() - well > UNWELL_S:
                    log.warning("The engine of %s did not answer for %g s and is ended.", self.name, UNWELL_S)
                    replica.server.kill()
            if not replica.server.is_alive:
                if self.is_ending():
                    return
                await self._replace(replica)
                well = looked = time.monotonic()

    async def _replace(self, replica: _Replica) -> None:
        """Start another engine in a lost one's place."""
        replica.is_up = False
        log.warning(
            "An engine of %s (pid %d, code %s) has ended and is started again; without another one its requests are "
            "answered 503 meanwhile. The end of its log:\n%s",
            self.name, replica.server.pid, replica.server.process.returncode, replica.server.tail(5),
        )  # fmt: skip
        await replica.client.close()
        pause_s = FIRST_PAUSE_S
        while True:
            folder, version = self._folder, self._version
            try:
                server = await in_thread(partial(self._launch, replica.number, folder, version))
                break
            except SamplerLost as error:
                log.error("The engine of %s does not start (again in %g s): %s", self.name, pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        replica.server, replica.client = server, self._connect(server.url)
        try:
            while version != self._version:  # weights that came while it started
                folder, version = self._folder, self._version
                await replica.client.update_weights_from_disk(str(folder), version)
        except (SamplerLost, BadRequest) as error:  # a lost one is started again
            log.warning("An engine of %s did not take the weights %s: %s", self.name, version, error)
        replica.is_up = True
        self._num_restarts += 1
        log.warning("The engine of %s is up again (pid %d).", self.name, server.pid)


async def takes(engines: Engines, folder: Path, version: str) -> bool:
    """Whether the engines took the weights; what keeps them from it is logged."""
    try:
        await engines.take_weights(folder, version)
    except SamplerError as error:
        log.warning("%s keeps its weights: %s", engines.name, error)
        return False
    return True
