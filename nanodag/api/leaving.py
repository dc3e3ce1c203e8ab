"""Clients that leave before their answer is there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

CLIENT_CLOSED_REQUEST = 499  # the status of a reply that nobody reads
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
