"""The thread that runs an engine for the server, the requests in flight there, and the moments between them at which
weights may change.

Everything that touches the engine happens in this thread, between steps: other threads hand in functions with
``call`` and get a future. Paused, the thread runs such functions only.
"""

import asyncio
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TypeVar

from nanodag.errors import BadRequest, SamplerError
from nanodag.host.threads import settle
from nanodag.inference.protocol import PauseMode
from nanodag.sampler.engine import Engine

log = logging.getLogger(__name__)
Result = TypeVar("Result")
HAS_ENDED = "the sampler's loop has ended: it was stopped"


class EngineLoop:
    """An engine, its thread, and whether it is paused. An error that no request caused ends the process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_paused = False
        self._commands: deque[tuple[Callable[[], object], Future]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the present step; running samples are dropped."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join()

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Run ``function`` in the loop's thread between two steps."""
        future: Future[Result] = Future()
        with self._wake:
            if self._is_stopping:
                future.set_exception(SamplerError(HAS_ENDED))
                return future
            self._commands.append((function, future))
            self._wake.notify()
        return future

    def pause(self, mode: PauseMode) -> None:
        """To be run by ``call``. Stop stepping; ``abort`` ends what runs and waits, ``retract`` drops its cache."""
        if mode == "abort":
            self.engine.abort(lambda running: True, "aborted by pause_generation")
        elif mode == "retract":
            self.engine.retract()
        self.is_paused = True

    def resume(self) -> None:
        """To be run by ``call``."""
        self.is_paused = False

    def _run(self) -> None:
        try:
            while self._run_commands():
                if self.engine.has_work and not self.is_paused:
                    self.engine.step()
        # Whatever it is, clients must hear of it, by their broken connections: a dead loop behind a live server looks
        # like a slow one.
        except BaseException:
            log.exception("the sampler's loop crashed")
            logging.shutdown()
            sys.stderr.flush()
            os._exit(1)
        for _, future in self._commands:  # no more come once it stops
            if future.set_running_or_notify_cancel():
                future.set_exception(SamplerError(HAS_ENDED))

    def _run_commands(self) -> bool:
        """Run what was handed in; wait for more if there is nothing else to do. False when it is time to stop."""
        with self._wake:
            while not self._commands and not self._is_stopping and (self.is_paused or not self.engine.has_work):
                self._wake.wait()
            commands, self._commands = self._commands, deque()
        for function, future in commands:
            settle(future, function)
        return not self._is_stopping


class Traffic:
    """The requests in flight, by name. Its coroutines run in one event loop, the engine in its own thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self._in_flight: set[str] = set()
        self._changed = asyncio.Condition()
        self._is_closed = False

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
        """These are in flight no longer; `paused` looks again, also after a pause, when none leaves."""
        async with self._changed:
            self._in_flight -= rids
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
