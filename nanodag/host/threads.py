"""Calls that block, made in threads beside an event loop; several tasks of a loop, begun and ended together."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import cache
from typing import Any, Generic, ParamSpec, TypeVar, cast

T = TypeVar("T")
P = ParamSpec("P")


class MadeOnce(Generic[P, T]):
    """`functools.cache` for a function that may be called from several threads at once: what it makes for the same
    arguments is made once."""

    def __init__(self, make: Callable[P, T]) -> None:
        self._lock, self._made = threading.Lock(), cache(make)

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        with self._lock:
            return self._made(*arguments, **named)  # type: ignore[arg-type] # they are hashable, or it raises

    def forget(self) -> None:
        self._made.cache_clear()


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
        except BaseException as raised:  # noqa: BLE001 - the caller gets it
            error = raised
        with suppress(RuntimeError):  # the loop may have been closed meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True).start()
    return await future


async def cancelled(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks, and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of calls, made at once; when one raises, the others are ended."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(*tasks)


class LoopThread:
    """An event loop in a thread of its own. loop: what belongs to it is used there alone."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name=name, daemon=True).start()

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work done in this loop, from another one. To cancel this ends the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
