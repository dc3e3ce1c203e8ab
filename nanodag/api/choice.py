"""Samples on their way to a client: text, tool calls and log-probabilities, out of the ids that an engine gives; those
of one request all at once."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from nanodag.api.served_model import Backend, Decoding, Limits, TokenText
from nanodag.api.tool_format import Call, Reader
from nanodag.errors import SamplerError
from nanodag.host.threads import all_of
from nanodag.inference.protocol import Completion, FinishReason, Request


@dataclass(frozen=True)
class ScoredToken:
    """A token with its logprob, and the likeliest ones at its place. start: where its text begins in the content.
    logprob: None for a prompt's first token."""

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    start: int


@dataclass(kw_only=True)
class New:
    """Additions to an answer since it was last looked at."""

    content: str
    calls: list[Call]
    scored: list[ScoredToken] = field(default_factory=list)


class ParsedAnswer:
    """stops: strings that end it; they are looked for in its content, also across the borders of tokens.

    finish_reason: OpenAI's, None while it grows; stop_reason: the string or token id that ended it, as vLLM has it.
    num_tokens: sampled, what ended it included.
    """

    def __init__(
        self,
        tokens: TokenText,
        reader: Reader,
        *,
        stops: Sequence[str],
        one_call: bool = False,
        scores_end: bool = False,
    ) -> None:
        """one_call: it ends with its first call. scores_end: the token that ends it is scored with the others."""
        self._decoding, self.reader = Decoding(tokens), reader
        self._stops, self._one_call, self._scores_end = stops, one_call, scores_end
        self._content = ""  # all that was read; a part of it may still be held back
        self._is_cut = False
        self._scored: deque[ScoredToken] = deque()
        self._num_said = self._num_calls_said = 0
        self._told: list[int] = []  # of each call that a stream told of: characters of its arguments
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.weight_version = ""
        self.prompt_scores: list[ScoredToken] = []

    @property
    def calls(self) -> list[Call]:
        return self.reader.calls[:1] if self._one_call else self.reader.calls

    def take(self, completion: Completion) -> None:
        """Add what is new in all of a sample so far. Raises SamplerError where the engine ended it."""
        reason = completion.finish_reason
        if reason is not None and reason.type == "abort":
            raise SamplerError(reason.message or "the sample was ended")
        self.weight_version = completion.weight_version
        self.num_cached_tokens = completion.num_cached_tokens
        if completion.prompt_ids and not self.prompt_scores:
            self.prompt_scores = _of_prompt(completion)
        num_ids = len(completion.output_ids)
        has_stop = reason is not None and reason.type == "stop" and isinstance(reason.matched, int)
        for place in range(self.num_tokens, num_ids):
            self._token(completion, place, is_end=has_stop and place == num_ids - 1)
            if self.finish_reason is not None:
                return
        if reason is not None:
            self._end(reason)

    def new(self) -> New:
        """Take what may be told by now and was not yet."""
        # A stop string may begin with the last characters.
        num_held = 0 if self.finish_reason else max((_overlap(self._content, stop) for stop in self._stops), default=0)
        visible = len(self._content) - num_held
        new = New(content=self._content[self._num_said : visible], calls=self.calls[self._num_calls_said :])
        self._num_said, self._num_calls_said = max(visible, self._num_said), len(self.calls)
        while self._scored and (self._scored[0].start < visible or (self.finish_reason and not self._is_cut)):
            new.scored.append(self._scored.popleft())
        return new

    def call_parts(self) -> list[tuple[int, str | None, str]]:
        """Additions to calls since the last look, the one that is still open included: the call's number in its answer,
        its name in its first piece alone, and what is new of its arguments."""
        open_call = self.reader.told() if self.finish_reason is None else None
        parts = []
        for index, call in enumerate([*self.calls, *([open_call] if open_call is not None else [])]):
            is_new = index == len(self._told)
            if is_new:
                self._told.append(0)
            if is_new or len(call.arguments) > self._told[index]:
                parts.append((index, call.name if is_new else None, call.arguments[self._told[index] :]))
                self._told[index] = len(call.arguments)
        return parts

    def _token(self, completion: Completion, place: int, *, is_end: bool) -> None:
        token = completion.output_ids[place]
        self.num_tokens += 1
        # The token that ends the turn has no text of the answer; one that ends a call is the reader's to see.
        piece = "" if is_end else self._decoding.step(token)
        if completion.logprobs and (self._scores_end or not is_end):
            top = completion.top_logprobs[place] if completion.top_logprobs else ()
            self._scored.append(ScoredToken(token, completion.logprobs[place], top, len(self._content)))
        before = len(self.calls)
        self._add(self.reader.take(token, piece))
        if self._one_call and self.finish_reason is None and len(self.calls) > before:
            self.finish_reason = "tool_calls"

    def _add(self, text: str) -> None:
        if not text:
            return
        # A stop string that this text completes begins at most so far before it.
        begin = max(0, len(self._content) - max(map(len, self._stops), default=0) + 1)
        self._content += text
        matches = [(place, stop) for stop in self._stops if (place := self._content.find(stop, begin)) >= 0]
        if matches:
            place, self.stop_reason = min(matches)
            self._content, self._is_cut = self._content[:place], True
            self.finish_reason = "stop"

    def _end(self, reason: FinishReason) -> None:
        self._add(self.reader.take(-1, self._decoding.rest()) + self.reader.end())
        if self.finish_reason is None:
            self.finish_reason = "tool_calls" if self.calls and not self.reader.is_cut else reason.type
            self.stop_reason = reason.matched


def _overlap(text: str, stop: str) -> int:
    """The longest end of the text that is a beginning of the stop string."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


def _of_prompt(completion: Completion) -> list[ScoredToken]:
    tops = completion.prompt_top_logprobs or [()] * len(completion.prompt_ids)
    return [
        ScoredToken(token, logprob, top or (), 0)
        for token, logprob, top in zip(completion.prompt_ids, completion.prompt_logprobs, tops, strict=True)
    ]


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
        async with asyncio.timeout(self._limits.request_timeout_s):
            await all_of(map(self._one, self.samples))

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
