"""The arguments of a `generate` function: a sample to continue, and a sampler that adds turns. No torch here."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from nanodag.errors import ConfigError
from nanodag.host.threads import MadeOnce
from nanodag.inference.protocol import Completion, Request, SamplingParams
from nanodag.inference.seeds import derived_seed
from nanodag.rl.rollouts.rollout import FinishReason, Span, finish_reason_of, prompt_span, span_of
from nanodag.tokenizer.chat import NO_SWITCHES, ChatRenderer, Switches
from nanodag.tokenizer.encoding import Encoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response as far as it is written. It is immutable: a turn or a tool result makes another one.

    record: the prompt's (nanodag.data.records). spans: the prompt's, then sampled ones and those of tools. seed: of
    the draws. max_sampled: `max_new_tokens`. max_tokens: the size of the context, prompt included.
    finish_reason: of the last turn; a sample that is returned must have one, `stop`, `text` or `length`. answer: what
    the reward sees; None for the text that was sampled after the last tool tokens. metadata: JSON values, kept with it.
    reward, components: what the reward `reported` then is. branches: further sequences of this sample, each with a
    prompt of its own (`beginning`), which are trained with its advantage; they have no branches themselves. role: who
    speaks in this sequence; a role is compared with itself, and one that reports a reward of its own is trained by
    that. is_trained: False for the sequence of a role that is not trained.
    """

    record: Mapping[str, Any]
    spans: tuple[Span, ...]
    seed: int
    max_sampled: int
    max_tokens: int
    finish_reason: FinishReason | None = None
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    branches: "tuple[Sample, ...]" = ()
    role: str = ""
    is_trained: bool = True

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every id so far; the next turn continues from them."""
        return tuple(token for span in self.spans for token in span.token_ids)

    @property
    def num_sampled(self) -> int:
        return sum(len(span.token_ids) for span in self.spans if span.kind == "sampled")

    @property
    def last_turn(self) -> tuple[int, ...]:
        """The ids of the last turn, the one that ended it included; empty before the first."""
        return next((span.token_ids for span in reversed(self.spans) if span.kind == "sampled"), ())

    @property
    def room(self) -> int:
        """Number of tokens that may still be sampled. Tool tokens take from the context, not from `max_new_tokens`."""
        return max(0, min(self.max_sampled - self.num_sampled, self.max_tokens - len(self.token_ids)))

    def with_tool(self, token_ids: Sequence[int]) -> "Sample":
        """This sample with a tool span behind it, whose tokens are never trained."""
        return replace(self, spans=(*self.spans, Span(kind="tool", token_ids=tuple(token_ids))))

    def beginning(self, token_ids: Sequence[int]) -> "Sample":
        """A sequence with another prompt and nothing sampled, for `branches`, with this one's record, seed and limits:
        max_sampled holds for each sequence."""
        return replace(
            self, spans=(prompt_span(token_ids),), finish_reason=None, answer=None, metadata={}, reward=None,
            components={}, branches=(),
        )  # fmt: skip

    def forked(self, count: int) -> "list[Sample]":
        """Copies with seeds of their own, so that they continue differently."""
        return [replace(self, seed=derived_seed(self.seed, "fork", number)) for number in range(count)]


@MadeOnce
def places(what: str, at_once: int) -> asyncio.Semaphore:
    """The places that all samples of an environment or agent share. Raises ConfigError where there are none."""
    if at_once < 1:
        raise ConfigError(f"{what}: at_once {at_once} must be above 0.")
    return asyncio.Semaphore(at_once)


@dataclass(frozen=True, slots=True, eq=False)
class TurnSampler:
    """Adds turns to samples. ask: sends one request, from any thread's event loop. renderer: the chat format, and
    switches of its template. held: a context in which time does not count as the function's own, as while it waits for
    a place among others. attempt: 0 unless the process that an earlier one ran in was killed."""

    ask: Callable[[Request], Awaitable[Completion]]
    _: KW_ONLY
    params: SamplingParams
    encoding: Encoding
    renderer: ChatRenderer
    switches: Switches = field(default_factory=dict)
    held: Callable[[], AbstractContextManager[None]] = nullcontext
    attempt: int = 0

    @property
    def stop_ids(self) -> Sequence[int]:
        """Tokens that end the assistant's speech."""
        return self.params.stop_token_ids

    @asynccontextmanager
    async def placed(self, place: AbstractAsyncContextManager[Any]) -> AsyncIterator[None]:
        """A place among others, held in here; to wait for it counts as no time of the function's."""
        with self.held():
            await place.__aenter__()
        try:
            yield
        finally:
            await place.__aexit__(None, None, None)

    async def turn(
        self, sample: Sample, *, max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> Sample:
        """The sample with one more sampled span, which ends with a token of `stop_ids` or of these, or is cut off.

        max_tokens: of this turn. Where there is no room left nothing is sampled, and the sample ends as cut off.
        Raises BadRequest for what no sampler can serve.
        """
        limit = sample.room if max_tokens is None else min(max_tokens, sample.room)
        if limit < 1:
            return replace(sample, finish_reason="length")
        seed = derived_seed(sample.seed, "turn", len(sample.token_ids))
        completion = await self.answer(sample.token_ids, seed=seed, max_tokens=limit, stop_token_ids=stop_token_ids)
        reason = finish_reason_of(completion)
        return replace(sample, spans=(*sample.spans, span_of(completion)), finish_reason=reason)

    async def answer(
        self, ids: Sequence[int], *, seed: int, max_tokens: int, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        """The sampler's answer behind ids, at most max_tokens tokens of it; where it is greedy the seed means nothing.
        Raises BadRequest for what no sampler can serve."""
        overrides = {
            "max_new_tokens": max_tokens,
            "stop_token_ids": (*self.stop_ids, *stop_token_ids),
            "sampling_seed": seed if self.params.temperature else None,
        }
        return await self.ask(Request(input_ids=list(ids), params=self.params.model_copy(update=overrides)))

    def switches_of(self, sample: Sample) -> Switches:
        """The switches of the chat template for this sample: the stage's, and over them those of its source."""
        return {**self.switches, **sample.record.get("template_options", NO_SWITCHES)}

    def encode(self, text: str) -> list[int]:
        """Ids of a text for `with_tool`; no special tokens."""
        return self.encoding.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens by name. For reading only: it is never turned into ids again."""
        return self.encoding.decode(ids)
