"""What took how long, and when: sums for the metrics, spans for a picture of who waited for whom. No torch here."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Span = tuple[str, float, float]
"""name, begin, end: seconds since 1970."""


TRAINERS = ("train", "checkpoint", "trainer_waits")


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """The spans as chrome://tracing and ui.perfetto.dev read them: a row for the trainer's side, one for the
    samplers'."""
    rows = {"trainer": 0, "samplers": 1}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": side}} for side, tid in rows.items()
    ]
    events = [
        {
            "ph": "X",
            "name": name,
            "pid": 0,
            "tid": rows["trainer" if name in TRAINERS else "samplers"],
            "ts": round(begin * 1e6),
            "dur": round((end - begin) * 1e6),
        }
        for name, begin, end in spans
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


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
