"""Seconds by name, added up until somebody takes them. No torch here."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """What ran beside something else is counted in full, so the parts may add up to more than `step`, the wall time."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._began = time.monotonic()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add what the block takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def taken(self) -> dict[str, float]:
        """Seconds by name since this was called last, and `step`, the wall time since then."""
        now = time.monotonic()
        seconds = {**self._seconds, "step": now - self._began}
        self._seconds, self._began = {}, now
        return seconds
