"""Clients that leave before their answer is there, or do not read it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ExceptionHandler

from nanodag.inference.access_checks import TooLarge

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # the status of a reply that nobody reads
READING_S = 30.0  # that a client may take to read an answer which has ended
T = TypeVar("T")


class Left(Exception):
    """The client has gone."""


async def unless_left(http: HttpRequest, work: Awaitable[T]) -> T:
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


def _has_left(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _too_large(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, TooLarge)
    return error.response


HANDLERS: Mapping[Any, ExceptionHandler] = {TooLarge: _too_large, ClientDisconnect: _has_left, Left: _has_left}
"""Answers of any server of ours to a body above its limit, and to a client that has gone."""


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
