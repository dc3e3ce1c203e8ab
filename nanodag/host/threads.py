"""Calls that block, made in threads beside an event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, cast

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """The result of a call in a thread of its own, which nobody waits for when the process ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(cast(T, value))

    def run() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as found:  # noqa: BLE001 - the caller gets it
            error = found
        with suppress(RuntimeError):  # the loop may have been closed meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True).start()
    return await future
