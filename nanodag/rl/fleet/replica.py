"""One sampler of several: the server that it is now, and what is under way there. No torch here."""

import asyncio
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nanodag.errors import SamplerError, SamplerLost
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import MemoryTag
from nanodag.rl.fleet.server_watch import ChildServer, ServerWatch

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """A sampler as it is now: another server in its place is another member."""

    number: int
    server: ChildServer
    client: SamplerClient


@dataclass
class Current:
    """The weights that all samplers are to have."""

    folder: Path
    version: int


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
        self._replacing: set[asyncio.Task[None]] = set()

    @property
    def is_up(self) -> bool:
        return self.restart is None

    @property
    def name(self) -> str:
        """For a message."""
        return f"Sampler {self.number} ({self.url or f'pid {self.server.pid}, {self.server.url}'})"

    def begin(self, replacing: Coroutine[Any, Any, None]) -> None:
        """Begin to put a server in its place; it is not up until whoever does so says that it is."""
        self.restart = task = asyncio.ensure_future(replacing)
        self._replacing.add(task)  # asyncio keeps no task by itself
        task.add_done_callback(self._replacing.discard)
        task.add_done_callback(_retrieved)

    async def until_up(self) -> None:
        """Wait until it is up. Raises SamplerLost when it cannot be started again."""
        while self.restart is not None:
            await asyncio.shield(self.restart)

    async def watched(self, work: Awaitable[T]) -> T:
        """The result of a call; as long as one is under way the sampler's health is looked at."""
        result = await self.watch.over(work)
        self.lost_in_a_row = 0
        return result

    def count_loss(self, error: SamplerError, *, most: int) -> None:
        """Note that it was lost. Raises SamplerLost when it was lost more than `most` times in a row."""
        self.lost_in_a_row += 1
        if self.lost_in_a_row > most:
            raise SamplerLost(
                f"{self.name} was lost {self.lost_in_a_row} times without having answered in between: {error}. The end "
                f"of its log:\n{self.server.tail()}"
            ) from error

    async def version_there(self, client: SamplerClient) -> str:
        """The weights that it says it has. Raises SamplerLost where a server of others says another version than it
        was given."""
        version = str((await client.model_info()).get("weight_version"))
        if self.url and version != str(self.version):
            raise SamplerLost(f"it says that it has weights {version}, and was given {self.version}")
        return version


def _retrieved(task: "asyncio.Task[None]") -> None:
    """Its error is met by whoever needs the sampler next; asyncio is not to complain if nobody does."""
    if not task.cancelled():
        task.exception()
