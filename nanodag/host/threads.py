"""Calls that block, made in threads beside an event loop, and calls made side by side in one."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import cache
from typing import Any, Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class MadeOnce(Generic[P, T]):
    """`functools.cache` for a function that several threads may call at once: for equal arguments it is called once."""

    def __init__(self, make: Callable[P, T]) -> None:
        self._lock, self._made = threading.Lock(), cache(make)

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        with self._lock:
            return self._made(*arguments, **named)  # type: ignore[arg-type] # they are hashable, or it raises

    def forget(self) -> None:
        self._made.cache_clear()


def settle(future: Future[T], call: Callable[[], T]) -> None:
    """Call it and have the future end as it does, unless whoever waits has given up before."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            future.set_exception(error)


def begun(call: Callable[[], T]) -> Future[T]:
    """The result to come of a call in a thread of its own, which nobody waits for when the process ends."""
    future: Future[T] = Future()
    threading.Thread(target=settle, args=(future, call), daemon=True).start()
    return future


async def in_thread(call: Callable[[], T]) -> T:
    """The result of a call in a thread as of `begun`."""
    return await asyncio.wrap_future(begun(call))


async def cancelled(*tasks: asyncio.Future[Any]) -> list[Any]:
    """Cancel tasks, and wait for their ends; the outcome of each, a result or an error."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of calls made side by side; when one raises, the others are ended."""
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
