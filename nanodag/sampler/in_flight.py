"""Requests in flight at the embedded server, and the moments between them at which weights may change."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from nanodag.errors import BadRequest
from nanodag.inference.protocol import Body, json_object, parse_body
from nanodag.sampler.engine_loop import EngineLoop

Result = TypeVar("Result")


class Traffic:
    """The requests in flight, by name. Its coroutines run in one event loop, the engine in its own thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self._in_flight: set[str] = set()
        self._changed = asyncio.Condition()
        self._is_closed = False

    @property
    def num_paused(self) -> int:
        """Requests that wait for the engine to go on."""
        return len(self._in_flight) if self.loop.is_paused else 0

    async def in_loop(self, function: Callable[[], Result]) -> Result:
        """The result of a function that runs in the engine's thread between two steps."""
        future: Future[Result] = self.loop.call(function)
        return await asyncio.wrap_future(future)

    async def enter(self, rids: set[str]) -> None:
        """Wait while weights change, then count these as in flight. Raises BadRequest for a rid in use."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_closed)
            if taken := rids & self._in_flight:
                raise BadRequest(f"rid {min(taken)!r} belongs to a request in flight: choose another")
            self._in_flight |= rids

    async def leave(self, rids: set[str]) -> None:
        async with self._changed:
            self._in_flight -= rids
            self._changed.notify_all()

    async def look_again(self) -> None:
        """Have `paused` see that the engine was paused."""
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Inside, no request is in flight, or all are paused; what comes meanwhile waits outside."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_closed)
            self._is_closed = True
            try:
                await self._changed.wait_for(lambda: self.loop.is_paused or not self._in_flight)
                yield
            finally:
                self._is_closed = False
                self._changed.notify_all()


def routes(method: str, endpoints: Iterable[Callable]) -> list[Route]:
    """Routes to endpoints, each under its function's name."""
    return [Route(f"/{endpoint.__name__}", endpoint, methods=[method]) for endpoint in endpoints]


async def body_of(http: HttpRequest, model: type[Body]) -> Body:
    """The validated body of a request; an empty one counts as {}. Raises BadRequest with what is wrong."""
    raw = await http.body()
    return parse_body(model, json_object(raw) if raw else {})
