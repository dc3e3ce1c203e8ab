"""A watch over servers with requests in flight: do they still serve? No torch here."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from nanodag.errors import SamplerLost
from nanodag.host.threads import cancelled
from nanodag.inference.client import SamplerClient

if TYPE_CHECKING:
    from nanodag.engines.external import ExternalServer
    from nanodag.engines.start import ServerProcess

log = logging.getLogger(__name__)
T = TypeVar("T")
PARTS = 10  # of the time in which a server is to answer
LOOK_S = 0.25  # an end is seen as soon

AnyServer: TypeAlias = "ServerProcess | ExternalServer"


@dataclass(eq=False)
class ServerWatch:
    """Watches one server as long as it has requests in flight.

    A server that does not answer for timeout_s, nor for as long again over another connection, or says for as long that
    it cannot serve, is killed: its requests in flight then fail at once. SGLang says so when its scheduler hangs. A
    server that is paused to take weights may say so, too (is_excused), and say nothing at all, unless it must_answer:
    its machine may be cut off. on_end: called when the server was killed, or has ended by itself.
    """

    server: AnyServer
    client: SamplerClient
    _: KW_ONLY
    every_s: float
    timeout_s: float
    must_answer: bool = False
    on_end: Callable[[SamplerLost], None] = lambda error: None
    is_excused: bool = field(default=False, init=False)
    may_generate: bool = field(default=True, init=False)  # False while it has no memory to: SGLang generates for health
    _num_calls: int = field(default=0, init=False)
    _looking: "asyncio.Task[None] | None" = field(default=None, init=False)
    _ended: "set[asyncio.Task[None]]" = field(default_factory=set, init=False)

    def begin(self) -> None:
        """Watch it from now on, until as many calls of `end` as of this."""
        self._num_calls += 1
        if self._looking is None:
            self._looking = asyncio.ensure_future(self.look())

    @contextmanager
    def during(self) -> Iterator[None]:
        """Watch it inside."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    async def over(self, work: Awaitable[T]) -> T:
        """The result of a call; the server is watched meanwhile."""
        with self.during():
            return await work

    def end(self, *, of_all: bool = False) -> None:
        """End one `begin`, or all."""
        self._num_calls = 0 if of_all else self._num_calls - 1
        if self._num_calls <= 0 and self._looking is not None:
            self._looking.cancel()
            self._ended.add(self._looking)
            self._looking.add_done_callback(self._ended.discard)
            self._looking = None

    async def leave(self) -> None:
        """End the watch, and wait until a health request in flight has been given up: it uses the client."""
        self.end(of_all=True)
        await asyncio.gather(*self._ended, return_exceptions=True)

    async def look(self) -> None:
        """Return when it has ended, or was killed."""
        ill_since, num_silent = math.inf, 0
        while True:
            if not num_silent:
                await self._rest()
            is_well = await self._answer() if self.server.is_alive else None
            num_silent = num_silent + 1 if is_well is None else 0
            if not self.server.is_alive:
                return self.on_end(SamplerLost(f"the server at {self.server.url} has ended"))
            if is_well or (self.is_excused and not (num_silent and self.must_answer)):
                ill_since, num_silent = math.inf, 0
                continue
            ill_since = min(ill_since, time.monotonic())
            if num_silent > 1 or (not num_silent and time.monotonic() - ill_since > self.timeout_s):
                log.warning("%s has not been well for %g s: killed", self.server.url, self.timeout_s)
                self.server.kill()
                return self.on_end(SamplerLost(f"the server at {self.server.url} was not well and was killed"))

    async def _rest(self) -> None:
        due = time.monotonic() + self.every_s
        while self.server.is_alive and (left_s := due - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, LOOK_S))
        await asyncio.sleep(0)

    async def _answer(self) -> bool | None:
        """True when it says that it is well; None for silence of timeout_s. They are waited for in parts: where
        this process does not run for long, one part is over, and what has come meanwhile is seen in the next."""
        request = asyncio.ensure_future(self.client.health(generates=self.may_generate))
        try:
            for _ in range(PARTS):
                if (await asyncio.wait([request], timeout=self.timeout_s / PARTS))[0]:
                    return request.result()
            return None
        except SamplerLost:  # of this health request alone: other requests may continue
            return False
        finally:
            await cancelled(request)
