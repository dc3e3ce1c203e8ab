"""What took how long, and when: sums for the metrics, spans for a picture of who waited for whom. No torch here."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

Span = tuple[str, float, float]
"""name, begin, end: seconds since 1970."""


class Stopwatch:
    """What ran beside something else is counted in full, so the parts may add up to more than `step`, the wall time."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._spans: list[Span] = []
        self._began = time.monotonic()
        self._offset = time.time() - self._began

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add what the block takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._seconds[name] = self._seconds.get(name, 0.0) + ended - began
            self._spans.append((name, round(began + self._offset, 4), round(ended + self._offset, 4)))

    def taken(self) -> tuple[dict[str, float], list[Span]]:
        """Since this was called last: seconds by name, `step` among them, the wall time; and what ended when."""
        now = time.monotonic()
        seconds, spans = {**self._seconds, "step": now - self._began}, self._spans
        self._seconds, self._spans, self._began = {}, [], now
        return seconds, spans
