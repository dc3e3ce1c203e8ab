"""One engine of a fleet: the server that it is now, and what is under way there. No torch here.

The fleet starts its processes; those of an `external.ExternalReplica` are somebody else's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanodag.engines.watch import AnyServer, ServerWatch
from nanodag.errors import SamplerError, SamplerLost
from nanodag.host.threads import in_thread
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import Completion, MemoryTag, Request

if TYPE_CHECKING:
    from nanodag.engines.roster import Roster

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""Between two starts that fail, of an engine that nobody waits for."""


@dataclass(frozen=True)
class Member:
    """An engine as it is now: another server in its place is another member."""

    number: int
    server: AnyServer
    client: SamplerClient


@dataclass
class WeightsFolder:
    """A folder of weights, and their version: of RL a number of steps, elsewhere a name."""

    folder: Path
    version: Any


NO_FOLDER = Path()
"""The folder of weights that are not known, or lost."""
Opened = tuple[AnyServer, SamplerClient, WeightsFolder]
"""A server that answers, a client of it, and the weights that it has."""


class Replica:
    """An engine whose processes the fleet starts. Where it may be lost any number of times, it is left out while it is
    away.

    folder, version: of the weights that it has. lost_in_a_row: times that it was lost without having answered anything
    in between. released: memory that its server has given back; one that takes its place has all of it. is_here:
    whether there is a server that may be given weights. is_up: it may be asked. is_awaited: where it is away the fleet
    waits, and ends where it is lost too often; else it is left out.
    """

    is_own = True  # the fleet starts and ends its processes
    must_answer = False  # it counts as lost when it is silent while it takes weights
    is_named = True  # it is to be among the fleet
    faults: type[SamplerError] = SamplerLost  # after which it is away

    server: AnyServer
    client: SamplerClient
    watch: ServerWatch
    folder: Path
    version: Any

    def __init__(self, number: int, fleet: "Roster") -> None:
        self.number, self._fleet = number, fleet
        self.is_awaited = self.is_own and fleet.max_restarts is not None
        self.load = 0
        self.lost_in_a_row = 0
        self.released: set[MemoryTag] = set()
        self.restart: asyncio.Future[None] | None = None
        self.is_here = False
        self.was_tried = asyncio.Event()
        self._returning: set[asyncio.Task[None]] = set()

    @property
    def is_up(self) -> bool:
        return self.restart is None

    @property
    def has_failed(self) -> bool:
        """True when it does not come back."""
        return self.restart is not None and self.restart.done()

    @property
    def name(self) -> str:
        """Its number, process and address, for a message."""
        return f"{self._fleet.name} {self.number} (pid {self.server.pid}, {self.server.url})"

    async def open(self, weights: WeightsFolder) -> Opened:
        """Have a server, with the weights that are current when their folder is there. Raises SamplerError where that
        cannot be now."""
        while True:
            now = replace(weights)
            await self._fleet.provide(now.folder)
            if now == weights:  # else it is to have others by now
                break
        try:
            server = await in_thread(partial(self._fleet.launch, self.number, now.folder, now.version))
        except OSError as error:  # no memory, no place on the disk, too many files
            raise SamplerLost(f"{self._fleet.name} {self.number} could not be started: {error}") from error
        return server, self._fleet.connect(server.url), now

    def pause_s(self, attempt: int) -> float:
        """Time before that attempt to have it back, counted from 1: none before the first, nor where it is waited
        for."""
        return 0.0 if self.is_awaited or attempt < 2 else min(FIRST_PAUSE_S * 2.0 ** min(attempt - 2, 16), MAX_PAUSE_S)

    def check_answers(
        self, requests: Sequence[Request], answers: Sequence[Sequence[Completion]], first: Any, last: Any
    ) -> None:
        """Raise SamplerError for answers that cannot be. first, last: versions of the weights that it was given since
        it was asked."""

    async def held_version(self, client: SamplerClient) -> str:
        """The weights that it says it has."""
        return str((await client.model_info()).get("weight_version"))

    def went(self, error: SamplerError) -> None:
        """Log that it is away, or still is. Raises SamplerLost where it was lost too often in a row."""
        if self._fleet.max_restarts is not None and self.lost_in_a_row > self._fleet.max_restarts:
            raise SamplerLost(
                f"{self.name} was lost {self.lost_in_a_row} times without having answered in between: {error}. The end "
                f"of its log:\n{self.server.tail()}"
            ) from error
        tail = self.server.tail()
        log.warning("%s was lost and is started again: %s. The end of its log:\n%s", self.name, error, tail)

    def came(self) -> None:
        """Log that it is up."""
        log.info("%s is up, with weights %s", self.name, self.version)

    def begin(self, returning: Coroutine[Any, Any, None]) -> None:
        """Begin to put a server in its place; it is not up until whoever does so says that it is."""
        self.restart = task = asyncio.ensure_future(returning)
        self._returning.add(task)  # asyncio keeps no task by itself
        task.add_done_callback(self._returning.discard)
        task.add_done_callback(_retrieved)

    def fail(self, error: SamplerError) -> None:
        """Have whoever needs it next meet an error."""
        self.restart = asyncio.get_running_loop().create_future()
        self.restart.set_exception(error)
        self.restart.exception()  # asyncio is not to complain if nobody does

    async def until_up(self) -> None:
        """Wait until it is up. Raises SamplerLost when it cannot be started again."""
        while self.restart is not None:
            await asyncio.shield(self.restart)

    async def watched(self, work: Awaitable[T]) -> T:
        """The result of a call; as long as one is under way the engine's health is looked at."""
        result = await self.watch.over(work)
        self.lost_in_a_row = 0
        return result

    async def disconnect(self) -> None:
        """Have no server, and no connection to the one that it was."""
        if hasattr(self, "server"):
            await self.watch.leave()
            self.server.kill()
            await self.client.close()


def _retrieved(task: "asyncio.Task[None]") -> None:
    """Its error is met by whoever needs the engine next; asyncio is not to complain if nobody does."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("an engine does not come back: %s", error)
