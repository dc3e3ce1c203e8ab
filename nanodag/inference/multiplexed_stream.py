"""The streams of one client of an embedded sampler, over one connection: see `sampler/multiplexed_stream.py`."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp
from pydantic_core import from_json

from nanodag.errors import SamplerError, SamplerLost
from nanodag.inference.protocol import Completion, completion_from_wire

Ask = Callable[[str, str, dict[str, Any]], Awaitable[bytes]]
Open = Callable[[dict[str, Any]], Awaitable[aiohttp.ClientResponse]]


class FeedReader:
    """ask(method, path, body): the sampler's answer. open(body): the answer to /feed, whose lines are still to come.
    silence_s: of the sampler, after which it counts as lost."""

    def __init__(self, url: str, ask: Ask, open: Open, silence_s: float) -> None:
        self._url, self._ask, self._open, self._silence_s = url, ask, open, silence_s
        self._name = ""
        self._told: dict[str, asyncio.Queue[Completion | str]] = {}  # by request; a text: why no more will come
        self._reading: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()

    async def stream(self, rid: str, body: dict[str, Any]) -> AsyncGenerator[Completion, None]:
        """Parts of a sample, as it grows: each item is all of it so far. To close it ends the request. Raises
        SamplerLost where the feed ends first, or is silent."""
        await self._be_open()
        told = self._told[rid] = asyncio.Queue()
        body = {**body, "rid": rid, "stream": True, "feed": self._name}
        asking = asyncio.ensure_future(self._ask("POST", "/generate", body))
        so_far: Completion | None = None
        has_ended = False
        try:
            await asyncio.shield(asking)
            while not has_ended:
                async with asyncio.timeout(self._silence_s):
                    part = await told.get()
                if isinstance(part, str):
                    raise SamplerLost(f"the sampler at {self._url} was lost: its feed has ended {part}".rstrip())
                so_far = part if so_far is None else _joined(so_far, part)
                has_ended = part.finish_reason is not None
                yield so_far
        except TimeoutError as error:
            raise SamplerLost(f"the sampler at {self._url} told nothing for {self._silence_s:g} s") from error
        finally:
            del self._told[rid]
            if not has_ended:
                task = asyncio.ensure_future(self._end(rid, asking))
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End what is under way."""
        tasks = [task for task in (self._reading, *self._ending) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _be_open(self) -> None:
        async with self._opening:
            if self._reading is None or self._reading.done():
                self._name = uuid.uuid4().hex
                try:
                    async with asyncio.timeout(self._silence_s):
                        response = await self._open({"name": self._name})
                except TimeoutError as error:
                    raise SamplerLost(f"the sampler at {self._url} opened no feed in {self._silence_s:g} s") from error
                self._reading = asyncio.ensure_future(self._read(response))

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        reason = ""
        try:
            async for line in lines(response.content):
                for event in from_json(line):
                    part = completion_from_wire(event)
                    if part.rid in self._told:
                        self._told[part.rid].put_nowait(part)
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            reason = f"({type(error).__name__}: {error!s:.200})"
        finally:
            response.close()
            for told in self._told.values():
                told.put_nowait(reason)

    async def _end(self, rid: str, asking: "asyncio.Future[bytes]") -> None:
        """Have the sampler end a request that nobody waits for, once it has it."""
        with suppress(SamplerError):
            await asking
            await self._ask("POST", "/abort_request", {"rid": rid})


def _joined(before: Completion, part: Completion) -> Completion:
    """All of a sample, of all before a part and the part."""
    return replace(
        part,
        output_ids=before.output_ids + part.output_ids,
        logprobs=before.logprobs + part.logprobs,
        prompt_ids=before.prompt_ids,
        prompt_logprobs=before.prompt_logprobs,
        top_logprobs=[*before.top_logprobs, *part.top_logprobs],
        prompt_top_logprobs=before.prompt_top_logprobs,
        num_told_tokens=0,
    )


async def lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The stream's own lines may not be longer than its buffer."""
    rest = b""
    async for block in stream.iter_any():
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
