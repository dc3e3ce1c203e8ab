"""Servers that somebody else runs, among a stage's samplers (nanodag.rl.fleet.attached). No torch here.

They are among them while they answer and have the current weights. One that is lost is left out, is asked for nothing,
and holds nobody up; when it answers again it takes the weights first. It never ends the stage, unless no sampler is
left.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from nanodag.errors import SamplerError, SamplerLost
from nanodag.inference.addresses import Address
from nanodag.inference.client import SamplerClient
from nanodag.rl.fleet.attached import Attachments
from nanodag.rl.fleet.replica import Current, Replica
from nanodag.rl.fleet.server_watch import ChildServer

log = logging.getLogger(__name__)


class ServersOfOthers:
    """Has them come, leaves them out, and has them come back.

    replicas: all samplers; those of others are added. current: the weights that all are to have. take_up: called with
    a server, and the folder and version of its weights, makes it a replica's. give: awaited with a client, a folder and
    its version, gives it the weights; raises SamplerError.
    """

    def __init__(
        self,
        attachments: Attachments,
        replicas: list[Replica],
        current: Current,
        *,
        take_up: Callable[[Replica, ChildServer, Path, int, SamplerClient], None],
        give: Callable[[SamplerClient, Path, int], Coroutine[Any, Any, None]],
    ) -> None:
        self.attachments, self._replicas, self._current = attachments, replicas, current
        self._take_up, self._give = take_up, give
        self._has_all_tried = False
        self._has_news = asyncio.Event()  # weights to give to who comes back: what samplers start with is for nobody
        self._may_give = asyncio.Event()
        self._may_give.set()
        self._giving: set[asyncio.Future[None]] = set()
        self._closing: set[asyncio.Future[None]] = set()

    def have_news(self) -> None:
        """The current weights are from now on given to who comes back."""
        self._has_news.set()

    async def hold_back(self) -> None:
        """Return when none takes weights by itself, and none will until `let_go`."""
        self._may_give.clear()
        await asyncio.gather(*self._giving, return_exceptions=True)

    def let_go(self) -> None:
        """Who comes back takes weights by itself again."""
        self._may_give.set()

    @property
    def are_held_back(self) -> bool:
        return not self._may_give.is_set()

    def arrange(self) -> None:
        """Begin with servers that are newly named; those that are named no more get no more prompts."""
        named = self.attachments.named()
        known = {replica.url for replica in self._replicas}
        for url in [url for url in named if url not in known]:
            self._replicas.append(replica := Replica(len(self._replicas), url))
            replica.begin(self._come_back(replica))
        for replica in self._replicas if self._may_give.is_set() else ():
            if replica.is_here and replica.url and replica.url not in named and replica.is_up:
                log.info("%s is no longer named: it gets no more prompts.", replica.name)
                replica.is_here = False
                replica.begin(self._come_back(replica, is_well=True))

    async def all_tried(self) -> None:
        """Wait, at first, until each that is named has been tried."""
        if not self._has_all_tried:
            await asyncio.gather(*(replica.was_tried.wait() for replica in self._replicas if replica.url))
            self._has_all_tried = True

    async def one_more(self, began: float, restarts: list[asyncio.Future[None]]) -> None:
        """Return when one more sampler may be up. Raises SamplerLost when there are servers of others alone, and none
        has been up since a time for as long as they are waited for. restarts: under way."""
        is_over = time.monotonic() - began > self.attachments.patience_s
        if is_over and all(replica.url for replica in self._replicas):
            raise self.attachments.why_none()
        came = [asyncio.ensure_future(asyncio.sleep(self.attachments.every_s)), *restarts]
        await asyncio.wait(came, return_when=asyncio.FIRST_COMPLETED)
        came[0].cancel()

    def leave_out(self, replica: Replica, error: SamplerError) -> None:
        """Ask one that was lost for nothing, until it comes back."""
        self.attachments.note(replica.url, error)
        replica.lost_in_a_row += 1
        replica.is_here = False
        replica.server.kill()
        closing = asyncio.ensure_future(replica.client.close())  # ends what it was asked
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        if replica.restart is None:  # else it was about to come back, and sees that it may not
            replica.begin(self._come_back(replica))

    def takes_part(self, replica: Replica) -> None:
        """Note that one which has the current weights is up, unless it was."""
        if not replica.is_up:
            self.attachments.note(replica.url, None)
            replica.restart = None
            log.info("%s takes part, with weights %d", replica.name, self._current.version)

    async def disconnect(self) -> None:
        """None comes back any more."""
        returning = [replica.restart for replica in self._replicas if replica.url and replica.restart is not None]
        for task in returning:
            task.cancel()
        await asyncio.gather(*returning, *self._closing, return_exceptions=True)

    async def _come_back(self, replica: Replica, *, is_well: bool = False) -> None:
        """Have it among the samplers as soon as it is named, fits and has the current weights. is_well: what it was
        asked it answers first."""
        attachments = self.attachments
        try:
            while is_well and replica.load and replica.server.is_alive:
                await asyncio.sleep(attachments.every_s)
            attempt = replica.lost_in_a_row
            while True:
                await _disconnected(replica)
                if attempt:
                    await asyncio.sleep(min(attachments.every_s * 2.0 ** min(attempt - 1, 16), attachments.longest_s))
                address = attachments.named().get(replica.url)
                attempt = 1 if address is None else attempt + 1
                if address is not None:
                    try:
                        await self._attach(address, replica)
                        return
                    except SamplerError as error:
                        if replica.restart is not asyncio.current_task():
                            return
                        attachments.note(replica.url, error)
                        replica.is_here = False
                replica.was_tried.set()
        finally:
            replica.was_tried.set()

    async def _attach(self, address: Address, replica: Replica) -> None:
        """Raises SamplerError when that cannot be, or it is lost meanwhile."""
        server, client = await self.attachments.attach(address)
        self._take_up(replica, server, Path(), self._current.version, client)
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
            folder, version = self._current.folder, self._current.version
            if replica.folder == folder:
                replica.version = version
                return self.takes_part(replica)
            replica.watch.is_excused = True
            giving = asyncio.ensure_future(replica.watch.over(self._give(client, folder, version)))
            self._giving.add(giving)
            giving.add_done_callback(self._giving.discard)
            try:
                await giving
                replica.folder, replica.version = folder, version
                await replica.version_there(client)
            except SamplerError:
                if folder == self._current.folder:
                    raise  # else the folder may be gone: it is to have others by now
            finally:
                replica.watch.is_excused = False


async def _disconnected(replica: Replica) -> None:
    """Have no connection to the server that it was."""
    if hasattr(replica, "server"):
        replica.server.kill()
        await replica.watch.leave()
        await replica.client.close()
