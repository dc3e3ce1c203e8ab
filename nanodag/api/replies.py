"""Replies in OpenAI's form: whole, or as the chunks of a stream."""

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nanodag.api.bodies import ChatBody, CompletionBody
from nanodag.api.choice import New, SampledChoice, ScoredToken
from nanodag.api.prompt_rendering import is_forced
from nanodag.api.served_model import Decoding, ServedModel, TokenText
from nanodag.api.tool_format import Call

LOWEST = -9999.0  # OpenAI's number for "never"; JSON has no infinity


class Reply:
    """Reply of either endpoint. kind, chunk_kind: of the object, as OpenAI calls it whole and in a stream. warnings:
    told where an answer ends, such as fields that have no effect."""

    def __init__(self, kind: str, chunk_kind: str, prefix: str, model: ServedModel) -> None:
        self._kind, self._chunk_kind, self.model = kind, chunk_kind, model
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.warnings: list[str] = []

    def chunk(
        self, samples: Sequence[SampledChoice], choices: Sequence[dict[str, Any]], kind: str = ""
    ) -> dict[str, Any]:
        """One event of a stream; of another kind where it is given."""
        has_ended = any(choice["finish_reason"] for choice in choices)
        warnings = [*self.warnings, *filter(None, map(self.warning, samples))] if has_ended else []
        versions = [sample.answer.weight_version for sample in samples if sample.answer.weight_version]
        return {
            "id": self.id,
            "object": kind or self._chunk_kind,
            "created": self._created,
            "model": self.model.name,
            "system_fingerprint": self.model.version(versions[-1] if versions else self.model.backend.weight_version),
            "choices": list(choices),
            **({"warnings": warnings} if warnings else {}),
        }

    def whole(self, samples: Sequence[SampledChoice]) -> dict[str, Any]:
        """The reply when all samples have ended."""
        choices = [self.choice(sample, sample.answer.new()) for sample in samples]
        return self.chunk(samples, choices, self._kind) | {"usage": usage(samples)}

    def choice(self, sample: SampledChoice, new: New) -> dict[str, Any]:
        raise NotImplementedError

    def warning(self, sample: SampledChoice) -> str:
        """Warnings about an answer; none for most."""
        return ""

    def first(self, sample: SampledChoice) -> list[dict[str, Any]]:
        """Choices that begin a stream."""
        return []

    def parts(self, sample: SampledChoice, new: New) -> list[dict[str, Any]]:
        """Choices of a stream for what came, with the finish reason where it ended."""
        raise NotImplementedError


def random_id(choice: int, number: int) -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ChatReply(Reply):
    """Reply of /v1/chat/completions. call_id: makes the identity of a tool call, by its choice and its number there;
    called once for each."""

    def __init__(self, model: ServedModel, body: ChatBody, call_id: Callable[[int, int], str] = random_id) -> None:
        super().__init__("chat.completion", "chat.completion.chunk", "chatcmpl", model)
        self._body, self.call_id = body, call_id

    def warning(self, sample: SampledChoice) -> str:
        if not is_forced(self._body) or sample.answer.calls:
            return ""
        return f"choice {sample.index}: tool_choice wants a call, and the answer has none"

    def choice(self, sample: SampledChoice, new: New) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": new.content or (None if new.calls else "")}
        message["refusal"] = None
        if new.calls:
            calls = enumerate(new.calls)
            message["tool_calls"] = [_call(call, self.call_id(sample.index, number)) for number, call in calls]
        return {"index": sample.index, "message": message, "logprobs": self._scores(new.scored), **_end(sample)}

    def first(self, sample: SampledChoice) -> list[dict[str, Any]]:
        return [self._part(sample, {"role": "assistant", "content": ""}, None)]

    def parts(self, sample: SampledChoice, new: New) -> list[dict[str, Any]]:
        parts = []
        if new.content or new.scored:
            parts.append(self._part(sample, {"content": new.content}, self._scores(new.scored)))
        for number, name, arguments in sample.answer.call_parts():
            # As OpenAI streams a call: its id, type and name in the first piece, its arguments over all of them.
            call: dict[str, Any] = {"function": {"arguments": arguments}}
            call = call if name is None else _call(Call(name, arguments), self.call_id(sample.index, number))
            parts.append(self._part(sample, {"tool_calls": [{"index": number, **call}]}, None))
        if sample.answer.finish_reason is not None:
            parts.append({"index": sample.index, "delta": {}, "logprobs": None, **_end(sample)})
        return parts

    def _part(self, sample: SampledChoice, delta: dict[str, Any], scores: Any) -> dict[str, Any]:
        return {"index": sample.index, "delta": delta, "logprobs": scores, "finish_reason": None}

    def _scores(self, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": [self._score(entry) for entry in scored], "refusal": None}

    def _score(self, entry: ScoredToken) -> dict[str, Any]:
        tokens = self.model.tokens
        top = [_named(tokens, token, logprob) for token, logprob in entry.top[: self._body.top_logprobs]]
        return {**_named(tokens, entry.token, entry.logprob), "top_logprobs": top}


class CompletionReply(Reply):
    """Reply of /v1/completions."""

    def __init__(self, model: ServedModel, body: CompletionBody) -> None:
        super().__init__("text_completion", "text_completion", "cmpl", model)
        self._num_top = body.logprobs
        self._echo = body.echo
        self._begun: set[int] = set()  # choices whose prompt was said

    def choice(self, sample: SampledChoice, new: New) -> dict[str, Any]:
        is_first = self._echo and sample.index not in self._begun
        self._begun.add(sample.index)
        scored = [*(self._of_prompt(sample) if is_first else ()), *new.scored]
        text = (sample.prompt_text if is_first else "") + new.content
        return {"index": sample.index, "text": text, "logprobs": self._scores(scored, sample), **_end(sample)}

    def parts(self, sample: SampledChoice, new: New) -> list[dict[str, Any]]:
        is_first = self._echo and sample.index not in self._begun
        is_new = new.content or new.scored or is_first or sample.answer.finish_reason
        return [self.choice(sample, new)] if is_new else []

    def _of_prompt(self, sample: SampledChoice) -> list[ScoredToken]:
        decoding, offset, placed = Decoding(self.model.tokens), -len(sample.prompt_text), []
        for entry in sample.answer.prompt_scores:
            placed.append(replace(entry, start=offset))
            offset += len(decoding.step(entry.token))
        return placed

    def _scores(self, scored: Sequence[ScoredToken], sample: SampledChoice) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        tokens = self.model.tokens
        return {
            "tokens": [tokens.name(entry.token) for entry in scored],
            "token_logprobs": [_finite(entry.logprob) for entry in scored],
            "top_logprobs": [self._top(entry) for entry in scored],
            "text_offset": [len(sample.prompt_text) + entry.start for entry in scored],
        }

    def _top(self, entry: ScoredToken) -> dict[str, float] | None:
        """The likeliest tokens and the one that is there, by name; of two of one name the likelier."""
        if entry.logprob is None:
            return None
        named: dict[str, float] = {}
        for token, logprob in [*entry.top[: self._num_top], (entry.token, entry.logprob)]:
            named.setdefault(self.model.tokens.name(token), _finite(logprob) or 0.0)
        return named


def usage(samples: Sequence[SampledChoice]) -> dict[str, Any]:
    """Tokens of a request. A prompt counts once, however many answers it has."""
    prompts = {id(sample.request.input_ids): len(sample.request.input_ids) for sample in samples}
    num_prompt, num_sampled = sum(prompts.values()), sum(sample.answer.num_tokens for sample in samples)
    num_cached = sum(sample.answer.num_cached_tokens for sample in samples)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": min(num_cached, num_prompt)},
    }


def _end(sample: SampledChoice) -> dict[str, Any]:
    return {"finish_reason": sample.answer.finish_reason, "stop_reason": sample.answer.stop_reason}


def _call(call: Call, identity: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": identity, "type": "function", "function": function}


def _named(tokens: TokenText, token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": tokens.name(token), "logprob": _finite(logprob), "bytes": list(tokens.bytes_of(token))}


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or math.isfinite(logprob) else LOWEST
