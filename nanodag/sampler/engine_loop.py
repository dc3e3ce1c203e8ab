"""The thread that runs an engine for the server.

Everything that touches the engine happens in this thread, between steps: other threads hand in functions with
``call`` and get a future. Paused, the thread runs such functions only.
"""

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from nanodag.errors import SamplerError
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
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            # The caller gets it, whatever it is, through the future.
            except Exception as error:  # noqa: BLE001
                future.set_exception(error)
        return not self._is_stopping
