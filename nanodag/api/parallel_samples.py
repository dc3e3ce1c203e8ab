"""The samples of one request, all under way at once."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from nanodag.api.choice import ParsedAnswer
from nanodag.api.served_model import Backend, Limits
from nanodag.inference.protocol import Request


@dataclass(frozen=True, kw_only=True)
class SampledChoice:
    """One choice of the reply. prompt_text: what `echo` puts before it."""

    index: int
    request: Request
    answer: ParsedAnswer
    prompt_text: str = ""


class Answering:
    """stream: whether the engine is asked for tokens as they come, which stop strings need as well as streams."""

    def __init__(self, backend: Backend, samples: Sequence[SampledChoice], limits: Limits, *, stream: bool) -> None:
        self._backend, self.samples, self._limits, self._stream = backend, samples, limits, stream
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Return when all have ended. Raises what kept the first from it, TimeoutError when it takes too long."""
        tasks = [asyncio.ensure_future(self._one(sample)) for sample in self.samples]
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def parts(self) -> AsyncGenerator[bool, None]:
        """True each time that there may be something new, `events_per_s` at most, and once at the end; False after a
        long silence. Raises as `run` does. To close it ends the samples."""
        running = asyncio.ensure_future(self.run())
        running.add_done_callback(lambda _: self._changed.set())
        try:
            while not running.done():
                try:
                    async with asyncio.timeout(self._limits.keep_alive_s):
                        await self._changed.wait()
                except TimeoutError:
                    yield False
                    continue
                self._changed.clear()
                yield True
                await asyncio.wait({running}, timeout=1 / self._limits.events_per_s)
            yield True
            await running
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await running

    async def _one(self, sample: SampledChoice) -> None:
        async with aclosing(self._backend.answer(sample.request, stream=self._stream)) as completions:
            async for completion in completions:
                sample.answer.take(completion)
                self._changed.set()
                if sample.answer.finish_reason is not None:
                    return
