"""A policy that is spoken to in messages: it answers a conversation, with calls of tools where some are declared."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from nanodag.api.bodies import Tool
from nanodag.api.tool_format import read_whole, reader_of
from nanodag.rl.environments.sample import Sample, TurnSampler
from nanodag.rl.environments.transcript import Transcript
from nanodag.rl.rollouts.segments import finish_reason_of
from nanodag.tokenizer.chat import NativeRenderer


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
        asked = await asyncio.to_thread(self._transcript.asked, messages, self._declared)
        room = min(self._given.max_sampled - self._num_sampled, self._given.max_tokens - len(asked.ids))
        if room < 1:
            return None
        renderer = self._sampler.renderer
        completion = await self._sampler.answer(
            asked.ids,
            seed=asked.seed(self._given.seed),
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
        self._transcript.answered(asked, completion, message)
        return message

    def sample(self, *, is_cut: bool = False) -> Sample:
        """The sample so far, to be returned by a generate function. is_cut: it ends as cut off."""
        sample = self._transcript.sample(self._given)
        return replace(sample, finish_reason="length") if is_cut else sample


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call as an object; empty where the model wrote none."""
    try:
        found = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
