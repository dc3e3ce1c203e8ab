"""Whether a server that is asked something still serves. No torch here."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from nanodag.errors import SamplerLost
from nanodag.inference.client import SamplerClient

log = logging.getLogger(__name__)
T = TypeVar("T")


class ChildServer(Protocol):
    """A server as a child process."""

    url: str

    @property
    def pid(self) -> int: ...

    @property
    def is_alive(self) -> bool: ...

    def last_log_lines(self) -> str:
        """The end of its log."""
        ...

    def stop(self) -> None:
        """Ask it to end, then make it."""
        ...

    def kill(self) -> None:
        """Make it end at once."""
        ...


class ServerWatch:
    """Over one server, as long as something is under way there.

    One that does not answer for timeout_s, or says for as long that it cannot serve, is killed: what is under way there
    then fails at once. SGLang says so when its scheduler hangs; one that is paused to take weights may say so, too
    (is_excused). on_end: told when it was killed, or has ended by itself.
    """

    def __init__(
        self,
        server: ChildServer,
        client: SamplerClient,
        *,
        every_s: float,
        timeout_s: float,
        on_end: Callable[[SamplerLost], None] = lambda error: None,
    ) -> None:
        self._server, self._client = server, client
        self._every_s, self._timeout_s = every_s, timeout_s
        self._on_end = on_end
        self._num_calls = 0
        self._looking: asyncio.Task[None] | None = None
        self._ended: set[asyncio.Task[None]] = set()
        self.is_excused = False

    async def over(self, work: Awaitable[T]) -> T:
        """The result of a call; as long as one is under way the server is looked at."""
        self._num_calls += 1
        if self._looking is None:
            self._looking = asyncio.ensure_future(self.look())
        try:
            return await work
        finally:
            self._num_calls -= 1
            if self._num_calls == 0:
                self.end()

    def end(self) -> None:
        """Look no longer."""
        if self._looking is not None:
            self._looking.cancel()
            self._ended.add(self._looking)
            self._looking.add_done_callback(self._ended.discard)
            self._looking = None

    async def leave(self) -> None:
        """Look no longer, and wait until a question that is under way has been given up: it uses the client."""
        self.end()
        await asyncio.gather(*self._ended, return_exceptions=True)

    async def look(self) -> None:
        """Return when it has ended, or was killed."""
        well = time.monotonic()
        while True:
            await asyncio.sleep(self._every_s)
            try:
                async with asyncio.timeout(self._timeout_s):  # wait_for of Python 3.11 may swallow a cancellation
                    is_well = await self._client.health()
            except SamplerLost:  # of this one question: what is under way may go on
                is_well = False
            except TimeoutError:
                is_well, well = False, -math.inf
            if not self._server.is_alive:
                return self._on_end(SamplerLost(f"the server at {self._server.url} has ended"))
            if is_well or self.is_excused:
                well = time.monotonic()
            elif time.monotonic() - well > self._timeout_s:
                log.warning("%s has not been well for %g s: killed", self._server.url, self._timeout_s)
                self._server.kill()
                return self._on_end(SamplerLost(f"the server at {self._server.url} was not well and was killed"))
