"""Clients that leave before their answer is there, or do not read it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # the status of a reply that nobody reads
READING_S = 30.0  # that a client may take to read an answer which has ended
T = TypeVar("T")


class Left(Exception):
    """The client has gone."""


async def unless_left(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of work for a request whose body was read. Raises Left, and ends the work, when the client leaves."""
    running = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait([running, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise Left
        return running.result()
    finally:
        running.cancel()
        leaving.cancel()
        await asyncio.gather(running, leaving, return_exceptions=True)


async def _left(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def left_unless_read(answering_s: float) -> AsyncIterator[None]:
    """Send a reply in here: a client that reads no longer, and does not leave, is left. answering_s: what the answer
    itself may take."""
    limit_s = answering_s + READING_S
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        log.warning("A client read nothing of its answer for %g s and was left.", limit_s)
