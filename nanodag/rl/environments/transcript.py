"""Transcript of one sample, messages outside, token ids inside; and a policy that is spoken to in messages. No torch.

An agent or an environment speaks in messages, and sends the whole conversation again with each call. A call whose
messages are those of an earlier one, its answer and more continues that call's ids: prompt, sampled ids, and what the
chat template puts behind them. Others begin a sequence of their own (docs/explanation/rl.md, Sequences of a sample).
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nanodag.api.bodies import Tool
from nanodag.api.tool_format import read_whole, reader_of
from nanodag.inference.protocol import Completion
from nanodag.inference.seeds import derived_seed
from nanodag.rl.environments.sample import Sample, TurnSampler
from nanodag.rl.rollouts.rollout import FinishReason, Span, finish_reason_of, prompt_span, span_of
from nanodag.tokenizer.chat import NO_SWITCHES, ChatRenderer, NativeRenderer, Switches
from nanodag.tokenizer.encoding import Encoding
from nanodag.tokenizer.messages import all_plain, meant, plain

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A call that the sampler is to answer. ids: to be continued. sequence: the number of the earlier call that it
    continues; None where it begins a sequence. repeat: how often these very ids were asked before."""

    ids: tuple[int, ...]
    sequence: int | None
    repeat: int
    meanings: tuple[Any, ...]  # of the messages; of a text none
    tools: str

    def seed(self, of_sample: int) -> int:
        """Seed that the answer is drawn with: it depends on what is asked, not on which of several calls came first."""
        digest = hashlib.blake2b(" ".join(map(str, self.ids)).encode(), digest_size=16).hexdigest()
        return derived_seed(of_sample, "turn", digest, self.repeat)


@dataclass(frozen=True, kw_only=True)
class _Answered:
    """An answered call. depth, num_sampled: calls and sampled tokens of its sequence so far."""

    asked: Asked
    span: Span
    finish_reason: FinishReason
    said: Any  # what its message means
    depth: int
    num_sampled: int

    @property
    def ids(self) -> tuple[int, ...]:
        return self.asked.ids + self.span.token_ids


class Transcript:
    """The calls of one sample. switches: of the chat template."""

    def __init__(self, renderer: ChatRenderer, encoding: Encoding, switches: Switches = NO_SWITCHES) -> None:
        self._renderer, self._encoding, self._switches = renderer, encoding, switches
        self._answered: list[_Answered] = []
        self._asked: dict[tuple[int, ...], int] = {}  # how often

    def asked(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Asked:
        """The ids that the sampler is to continue, for a conversation in OpenAI's form and the tools that are declared.
        Raises SourceError for messages that the chat format has no place for."""
        plain_messages = tuple(all_plain(messages))
        declared = json.dumps(list(tools), sort_keys=True)
        meanings = tuple(map(meant, plain_messages))
        sequence = self._goes_on(meanings, declared)
        further = None
        if sequence is not None:
            earlier = self._answered[sequence]
            place = len(earlier.asked.meanings)
            further = self._renderer.following(
                plain_messages, place, earlier.span.token_ids, self._switches, tools=tools
            )
        if further is None:
            sequence, ids = None, tuple(self._renderer.opened(plain_messages, self._switches, tools=tools))
        else:
            ids = (*earlier.ids, *further)
        return self._noted(ids, sequence, meanings, declared)

    def text_asked(self, ids: Sequence[int]) -> Asked:
        """A text to continue: it goes on with the longest that it begins with. Texts have a transcript of their own."""
        key = tuple(ids)
        earlier = [(-len(c.ids), n) for n, c in enumerate(self._answered) if c.ids == key[: len(c.ids)]]
        return self._noted(key, min(earlier)[1] if earlier else None)

    def _noted(
        self, ids: tuple[int, ...], sequence: int | None, meanings: tuple[Any, ...] = (), tools: str = ""
    ) -> Asked:
        repeat = self._asked.get(ids, 0)
        self._asked[ids] = repeat + 1
        return Asked(ids=ids, sequence=sequence, repeat=repeat, meanings=meanings, tools=tools)

    def answered(self, asked: Asked, completion: Completion, message: Message) -> None:
        """Note what the sampler said. message: how whoever asked reads it, which it sends again when it goes on. Raises
        SamplerError for a completion that the sampler gave up."""
        before = None if asked.sequence is None else self._answered[asked.sequence]
        reason = finish_reason_of(completion)  # first: of one that the sampler gave up the rest may be unsound
        span, said = span_of(completion), meant(plain(message))
        self._answered.append(
            _Answered(
                asked=asked,
                span=span,
                finish_reason=reason,
                said=said,
                depth=1 + (before.depth if before else 0),
                num_sampled=len(span.token_ids) + self.num_sampled(asked),
            )
        )

    def num_sampled(self, asked: Asked) -> int:
        """Tokens that were sampled in the sequence that a call continues."""
        return 0 if asked.sequence is None else self._answered[asked.sequence].num_sampled

    def longest(self) -> int | None:
        """The end of the conversation of most calls, then of most sampled tokens; None where nothing was answered."""
        calls = [(call.depth, call.num_sampled, call.asked.ids, call.span.token_ids) for call in self._answered]
        return max(range(len(calls)), key=calls.__getitem__, default=None)

    def sample(self, base: Sample, *, last: int | None = None) -> Sample:
        """The calls as sequences: the main one with the others as its branches, in an order that does not depend on
        that in which calls came. base: the sample as the generate function got it, with the prompt alone.

        The main sequence is the one that was answered last; but where that begins with another prompt, one that begins
        with the sample's. The reward sees the last answer in any case. last: which answer counts as the last, from 0 in
        their order, for callers that answer several calls at once. Raises ValueError where nothing was answered.
        """
        if not self._answered:
            raise ValueError("the sampler was asked for nothing, so there is nothing to train")
        number = len(self._answered) - 1 if last is None else last
        final, chains, prompt = self._answered[number], self._chains(number), base.spans[0].token_ids
        main = next(chain for chain in chains if any(call is final for call in chain))
        if main[0].asked.ids != prompt:
            main = next((chain for chain in chains if chain[0].asked.ids == prompt), main)
        sample = _spans(base, main)
        if main[-1] is not final and base.answer is None:
            ids = final.span.token_ids
            ids = ids[:-1] if final.finish_reason == "stop" else ids
            sample = replace(sample, answer=self._encoding.decode(ids))
        return replace(sample, branches=tuple(_spans(base, chain) for chain in chains if chain is not main))

    def _goes_on(self, meanings: tuple[Any, ...], tools: str) -> int | None:
        """The call with the longest conversation that these messages go on with."""
        matches = []
        for number, call in enumerate(self._answered):
            size = len(call.asked.meanings)
            if call.asked.tools == tools and (*call.asked.meanings, call.said) == meanings[: size + 1]:
                matches.append((-size, *self._key(number), number))
        return min(matches)[-1] if matches else None

    def _chains(self, last: int) -> list[list[_Answered]]:
        """The calls of each sequence. One that was continued twice stands in the sequence of the last answer, else in
        that of the first of the two by their ids."""
        order = sorted(range(len(self._answered)), key=self._key)
        later: int | None = last
        preferred: set[int] = set()
        while later is not None:
            preferred.add(later)
            later = self._answered[later].asked.sequence
        chains: list[list[int]] = []
        taken: set[int] = set()
        for number in order:  # a call stands behind those that it continues: their ids are the beginning of its own
            if number in taken:
                continue
            chain = [number]
            while following := [n for n in order if self._answered[n].asked.sequence == chain[-1]]:
                chain.append(next((n for n in following if n in preferred), following[0]))
            taken.update(chain)
            chains.append(chain)
        return [[self._answered[number] for number in chain] for chain in chains]

    def _key(self, number: int) -> tuple[Any, ...]:
        call = self._answered[number]
        return call.asked.ids, call.span.token_ids


def _spans(base: Sample, chain: Sequence[_Answered]) -> Sample:
    """A sequence: what was sampled, and between that what stands there in the prompts."""
    spans: list[Span] = []
    before: tuple[int, ...] = ()
    for call in chain:
        if between := call.asked.ids[len(before) :]:
            spans.append(Span(kind="tool", token_ids=between) if spans else prompt_span(between))
        spans.append(call.span)
        before = call.ids
    return replace(base, spans=tuple(spans), finish_reason=chain[-1].finish_reason)


class Conversation:
    """The conversations of one sample. tools: that each call declares, in OpenAI's form. is_cut: whether the last
    answer reached `max_new_tokens` or the end of the context."""

    def __init__(self, sampler: TurnSampler, sample: Sample, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._sampler, self._given, self._declared = sampler, sample, tools
        self._tools = [Tool.model_validate(tool) for tool in tools]
        self._transcript = Transcript(sampler.renderer, sampler.encoding, sampler.switches_of(sample))
        self._num_sampled = self._num_calls = 0
        self.is_cut = False

    async def answer(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int = 0) -> dict[str, Any] | None:
        """The policy's message, to be sent again with what follows it: `content`, and `tool_calls` if it made some.
        None where `max_new_tokens` or the context leaves no room. max_tokens: of this answer, 0 for no bound of its
        own. Raises SourceError for messages that the chat format has no place for."""
        # A long text takes long, and others share this event loop.
        request = await asyncio.to_thread(self._transcript.asked, messages, self._declared)
        room = min(self._given.max_sampled - self._num_sampled, self._given.max_tokens - len(request.ids))
        if room < 1:
            return None
        renderer = self._sampler.renderer
        completion = await self._sampler.answer(
            request.ids,
            seed=request.seed(self._given.seed),
            max_tokens=min(room, max_tokens or room),
            stop_token_ids=[renderer.call_end] if self._tools and isinstance(renderer, NativeRenderer) else (),
        )
        ids = completion.output_ids
        self._num_sampled += len(ids)
        reader = reader_of(renderer, self._tools)
        self.is_cut = len(ids) == room and finish_reason_of(completion) == "length"
        has_end = bool(ids) and ids[-1] in self._sampler.stop_ids
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = read_whole(reader, self._sampler.encoding, ids[:-1] if has_end else ids)
        if reader.calls:
            message["tool_calls"] = [
                {"id": f"call_{number}", "type": "function", "function": asdict(call)}
                for number, call in enumerate(reader.calls, self._num_calls)
            ]
            self._num_calls += len(reader.calls)
        self._transcript.answered(request, completion, message)
        return message

    def sample(self, *, is_cut: bool = False) -> Sample:
        """The sample so far, to be returned by a generate function. is_cut: it ends as cut off."""
        sample = self._transcript.sample(self._given)
        return replace(sample, finish_reason="length") if is_cut else sample


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call as an object; None where the model wrote something else."""
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None
