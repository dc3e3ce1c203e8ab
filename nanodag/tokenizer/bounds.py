"""Bounds on what is rendered and tokenised for somebody else: tokens, time of a template, and that they still wait."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

from nanodag.errors import SourceError

SLICE_CHARS = 1 << 16  # tokenised in one call, in which nothing can end it
CUT_TOKENS = 64  # that a cut between two slices may add, at most
TEMPLATE_CPU_S = 5.0
_CHECKED_LINES = 256


class TooManyTokens(SourceError):
    """A text has more tokens than its bound."""


class GivenUp(SourceError):
    """Nobody waits for the result any longer."""


class Bound:
    """Bound of one request. max_tokens: of all its texts together. Any thread may `give_up`."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._is_given_up = threading.Event()

    def give_up(self) -> None:
        """End the work at the next look."""
        self._is_given_up.set()

    def check_texts(self, texts: Sequence[str], num_tokens_of: Callable[[str], int]) -> None:
        """Count a long input slice by slice, no further than the bound. Raises TooManyTokens, GivenUp."""
        if sum(map(len, texts)) <= SLICE_CHARS:
            return
        num_tokens = 0
        for piece in _slices(texts):
            num_tokens += num_tokens_of(piece) - CUT_TOKENS
            self.check_tokens(num_tokens)

    def check_tokens(self, num_tokens: int) -> None:
        """Raise TooManyTokens for more than the bound, GivenUp where nobody waits."""
        if self._is_given_up.is_set():
            raise GivenUp("whoever asked has left")
        if num_tokens > self._max_tokens:
            raise TooManyTokens(f"This model's maximum context length is {self._max_tokens} tokens.")

    @contextmanager
    def of_template(self) -> Iterator[None]:
        """Run a chat template in here: CPU time is bounded, of its loops too. Raises SourceError, GivenUp."""
        deadline, num_lines = time.thread_time() + TEMPLATE_CPU_S, 0

        def inside(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal num_lines
            num_lines += 1
            if num_lines % _CHECKED_LINES == 0:
                if self._is_given_up.is_set():
                    raise GivenUp("whoever asked has left")
                if time.thread_time() > deadline:
                    raise SourceError(f"the chat template took more than {TEMPLATE_CPU_S:g} s of CPU time")
            return inside

        def called(frame: FrameType, event: str, argument: Any) -> Any:
            return inside if frame.f_code.co_filename == "<template>" else None  # as jinja2 calls compiled ones

        before = sys.gettrace()
        sys.settrace(called)
        try:
            yield
        finally:
            sys.settrace(before)


in_force: ContextVar[Bound | None] = ContextVar("bound", default=None)
"""The bound of the request that is worked on; None outside of `bounded`."""


@contextmanager
def bounded(max_tokens: int) -> Iterator[Bound]:
    """Bound what is tokenised in here, and in the threads that `asyncio.to_thread` starts; given up when left."""
    bound = Bound(max_tokens)
    token = in_force.set(bound)
    try:
        yield bound
    finally:
        bound.give_up()
        in_force.reset(token)


def _slices(texts: Sequence[str]) -> Iterator[str]:
    """All texts in pieces: long ones cut, short ones joined."""
    waiting: list[str] = []
    num_chars = 0
    for text in texts:
        for start in range(0, len(text), SLICE_CHARS):
            waiting.append(text[start : start + SLICE_CHARS])
            num_chars += len(waiting[-1])
            if num_chars >= SLICE_CHARS:
                yield "".join(waiting)
                waiting, num_chars = [], 0
    yield "".join(waiting)
