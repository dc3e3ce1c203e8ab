"""Streams of one client, told of over one connection of its: a write to a socket costs more than a step's token.

`POST /feed {"name": NAME}` is answered with lines as long as both live, each a JSON list of events. `POST /generate`
with `"stream": true, "feed": NAME, "rid": RID` is answered at once with {}, and what comes of it goes into that feed:
as in a stream of its own, but that an event has the tokens that none before it had, and no text. A feed that ends takes
its requests with it. SGLang has no such thing.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanodag.errors import BadRequest
from nanodag.inference.protocol import Completion, FeedBody, completion_to_wire
from nanodag.sampler.in_flight import Traffic, body_of


class Feed:
    """Events that are to be told over one connection. It lives in the event loop."""

    def __init__(self) -> None:
        self.rids: set[str] = set()
        """Of its requests in flight."""
        self._letters: list[Completion] = []
        self._has_letters = asyncio.Event()

    @contextmanager
    def holding(self, rids: set[str]) -> Iterator[None]:
        """Count them as in flight, unless what happens in here fails."""
        self.rids |= rids
        try:
            yield
        except BaseException:
            self.rids -= rids
            raise

    def put_nowait(self, letter: Completion) -> None:
        self._letters.append(letter)
        self._has_letters.set()

    async def letters(self) -> list[Completion]:
        """Events since this was asked last, and at least one."""
        await self._has_letters.wait()
        self._has_letters.clear()
        letters, self._letters = self._letters, []
        return letters


class Feeds:
    """The open feeds, by name. drop: ends the requests of these names in the engine."""

    def __init__(self, traffic: Traffic, drop: Callable[[set[str]], None]) -> None:
        self._traffic, self._drop = traffic, drop
        self._feeds: dict[str, Feed] = {}

    def route(self) -> Route:
        return Route("/feed", self.open, methods=["POST"])

    def named(self, name: str) -> Feed:
        """Raises BadRequest where there is none."""
        if name not in self._feeds:
            raise BadRequest(f"feed {name[:80]!r} is not open: POST /feed first, and read its answer")
        return self._feeds[name]

    async def open(self, http: HttpRequest) -> Response:
        name = (await body_of(http, FeedBody)).name
        if name in self._feeds:
            raise BadRequest(f"feed {name[:80]!r} is open already: choose another name")
        self._feeds[name] = feed = Feed()

        async def end() -> None:
            del self._feeds[name]
            self._drop(set(feed.rids))
            await self._traffic.leave(feed.rids)

        return EventStream(self._lines(feed), end, media_type="application/x-ndjson")

    async def _lines(self, feed: Feed) -> AsyncIterator[bytes]:
        while True:
            letters = await feed.letters()
            yield to_json([_event(letter) for letter in letters]) + b"\n"
            if ended := {letter.rid for letter in letters if letter.finish_reason is not None}:
                feed.rids -= ended
                await self._traffic.leave(ended)


def _event(letter: Completion) -> dict[str, object]:
    return completion_to_wire(letter, return_logprob=bool(letter.logprobs or letter.prompt_logprobs))


class EventStream(StreamingResponse):
    """A stream that cleans up however it ends, also when the client leaves before its first event."""

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], Awaitable[None]], *, media_type: str) -> None:
        super().__init__(events, media_type=media_type)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._end()
