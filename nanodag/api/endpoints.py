"""/v1/models, /v1/chat/completions and /v1/completions; as vLLM has them, /tokenize, /detokenize and /version."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanodag import __version__
from nanodag.api.bodies import (
    SGLANG_SAMPLING,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Parsed,
    SamplingBody,
    TokenizeBody,
    parse_body,
)
from nanodag.api.choice import Answering, ParsedAnswer, SampledChoice
from nanodag.api.metrics import SAMPLES, Metrics
from nanodag.api.prompt_rendering import ChatPrompt, chat_prompt
from nanodag.api.refusals import UNAVAILABLE, Refused, refusal_of
from nanodag.api.replies import ChatReply, CompletionReply, Reply, usage
from nanodag.api.served_model import Limits, ServedModel, model_named
from nanodag.api.tool_format import Reader
from nanodag.host.images import words_in
from nanodag.inference.access_checks import left_unless_read, unless_left
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.tokenizer.bounds import TooManyTokens, bounded

SEEDS = 1 << 63
LARGE_BODY_BYTES = 1 << 18  # read beside the event loop


class Endpoints:
    """Handlers of the routes. models: by name; the first is asked where a request names none."""

    def __init__(self, models: Mapping[str, ServedModel], limits: Limits, metrics: Metrics) -> None:
        self._models, self._limits, self._metrics = models, limits, metrics

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.one_model, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/version", self.version, methods=["GET"]),
        ]

    async def list_models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [_card(model) for model in self._models.values()]})

    async def one_model(self, http: HttpRequest) -> Response:
        return JSONResponse(_card(self.model_of(http.path_params["name"])))

    async def chat(self, http: HttpRequest) -> Response:
        body = await _parsed(ChatBody, http)
        model = self.model_of(body.model)
        prompt = await unless_left(http, self.chat_prompt(model, body))
        max_tokens = body.max_completion_tokens or body.max_tokens
        num_top = body.top_logprobs if body.logprobs else None
        if body.top_logprobs and not body.logprobs:
            raise Refused("top_logprobs is only told with logprobs: true", param="top_logprobs")
        further = further_params(model, body) | _grammar(model, body)
        samples = self._samples(
            model, body, [prompt.ids], prompt.reader, max_tokens=max_tokens, num_top=num_top, stop_ids=prompt.stop_ids,
            further=further, one_call=not body.parallel_tool_calls,
        )  # fmt: skip
        has_tools = type(samples[0].answer.reader) is not Reader
        reply = self.chat_reply(model, body)
        reply.warnings += prompt.warnings
        return await self._answered(http, body, reply, samples, is_cut=has_tools)

    async def completions(self, http: HttpRequest) -> Response:
        body = await _parsed(CompletionBody, http)
        model = self.model_of(body.model)
        raw_prompts = body.prompts(longest=model.context_length)

        def ids_of_all() -> list[list[int]]:
            special = body.add_special_tokens
            return [
                model.tokens.prompt_ids(prompt, special=special) if isinstance(prompt, str) else prompt
                for prompt in raw_prompts
            ]

        prompts = await unless_left(http, self._tokenized(model, ids_of_all))
        echoed = raw_prompts if body.echo else [""] * len(raw_prompts)
        texts = [prompt if isinstance(prompt, str) else model.tokens.decode(prompt) for prompt in echoed]
        samples = self._samples(
            model, body, prompts, Reader, max_tokens=body.max_tokens, num_top=body.logprobs,
            stop_ids=model.tokens.encoding.end_ids, further=further_params(model, body), texts=texts,
            score_prompt=body.max_tokens == 0 or (body.echo and body.logprobs is not None),
        )  # fmt: skip
        return await self._answered(http, body, CompletionReply(model, body), samples)

    async def tokenize(self, http: HttpRequest) -> Response:
        """Ids of a text, or of the conversation that an answer would continue."""
        body = await _parsed(TokenizeBody, http)
        model, text = self.model_of(body.model), body.prompt
        if bool(body.messages) == (text is not None):
            raise Refused("give either prompt, a text, or messages", param="prompt")

        def made() -> dict[str, Any]:
            if text is None:
                ids = chat_prompt(model, body).ids
            else:
                ids = model.tokens.prompt_ids(text, special=body.add_special_tokens)
            names = list(map(model.tokens.name, ids)) if body.return_token_strs else None
            return {"count": len(ids), "max_model_len": model.context_length, "tokens": ids, "token_strs": names}

        content = await unless_left(http, self._tokenized(model, made))
        return Response(to_json(content), media_type="application/json")

    async def detokenize(self, http: HttpRequest) -> Response:
        """The text of ids, special tokens by their names."""
        body = await _parsed(DetokenizeBody, http)
        model = self.model_of(body.model)
        if any(token >= model.vocab_size for token in body.tokens):
            raise Refused(f"tokens has ids outside the vocabulary of {model.vocab_size}", param="tokens")
        text = await self._tokenized(model, lambda: model.tokens.encoding.decode(body.tokens))
        return Response(to_json({"prompt": text}), media_type="application/json")

    async def version(self, http: HttpRequest) -> Response:
        return JSONResponse({"version": __version__})

    async def chat_prompt(self, model: ServedModel, body: ChatBody) -> ChatPrompt:
        """The ids that a conversation's answer continues, and how it is read."""
        prompt: ChatPrompt = await self._tokenized(model, lambda: chat_prompt(model, body))
        return prompt

    def chat_reply(self, model: ServedModel, body: ChatBody) -> ChatReply:
        """The form of a conversation's answer."""
        return ChatReply(model, body)

    def admit(self, body: SamplingBody, samples: Sequence[SampledChoice]) -> None:
        """Take note of a request that will be answered; a subclass may raise Refused."""

    def model_of(self, name: str) -> ServedModel:
        """The model that a request names. Raises Refused where there is none."""
        return model_named(self._models, name)

    async def _tokenized(self, model: ServedModel, work: Callable[[], Any]) -> Any:
        """Run a function beside the event loop. It ends at the model's context, and with whoever asked."""
        with bounded(model.context_length):
            try:
                return await asyncio.to_thread(work)
            except TooManyTokens as error:
                raise Refused(
                    f"{error} However, you requested more than that. Please reduce the prompt.",
                    code="context_length_exceeded",
                ) from error

    def _samples(
        self,
        model: ServedModel,
        body: SamplingBody,
        prompts: Sequence[list[int]],
        reader: Callable[[], Reader],
        *,
        max_tokens: int | None,
        num_top: int | None,
        stop_ids: Sequence[int] = (),
        further: Mapping[str, Any],
        texts: Sequence[str] = ("",),
        score_prompt: bool = False,
        one_call: bool = False,
    ) -> list[SampledChoice]:
        """The request's samples, each a request of its own to the engine: so each ends by itself, and choice number i
        of a seed is what the seed i higher gives alone. Raises Refused for what does not fit."""
        self._limits.check_count(len(prompts) * body.n, f"{len(prompts)} prompts with {body.n} choices each")
        samples: list[SampledChoice] = []
        for ids, text in zip(prompts, texts, strict=True):
            most = self.most_new(model, ids, max_tokens, "messages" if isinstance(body, ChatBody) else "prompt")
            for choice in range(body.n):
                params = SamplingParams(
                    max_new_tokens=most,
                    temperature=body.temperature,
                    top_p=body.top_p,
                    top_k=body.top_k if body.top_k > 0 else -1,
                    stop_token_ids=tuple({*stop_ids, *body.stop_token_ids}),
                    ignore_eos=body.ignore_eos,
                    sampling_seed=None if body.seed is None else (body.seed + choice) % SEEDS,
                )
                request = Request(
                    input_ids=ids,
                    params=params,
                    return_logprob=num_top is not None or score_prompt,
                    score_prompt=score_prompt,
                    top_logprobs=num_top or 0,
                    lora_path=model.lora_path,
                    further=further,
                )
                # lm-eval takes a completion's last logprob for that of the one token that it asked for.
                is_text = isinstance(body, CompletionBody)
                answer = ParsedAnswer(model.tokens, reader(), stops=body.stops, one_call=one_call, scores_end=is_text)
                samples.append(SampledChoice(index=len(samples), request=request, answer=answer, prompt_text=text))
        return samples

    def most_new(self, model: ServedModel, ids: Sequence[int], max_tokens: int | None, param: str) -> int:
        """Tokens that the answer may have. param: the field that gave the prompt. Raises Refused for a prompt, or a
        wish, that is too long."""
        context, limits = model.context_length, self._limits
        if not ids or min(ids) < 0 or max(words_in(ids) if model.reads_images else ids, default=0) >= model.vocab_size:
            raise Refused(f"a prompt is empty, or has ids outside the vocabulary of {model.vocab_size}", param=param)
        num_new = 1 if max_tokens is None else max_tokens
        if len(ids) + num_new > context:
            raise Refused(
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{len(ids) + num_new} tokens ({len(ids)} in the prompt, {num_new} in the answer). Please reduce "
                "either.",
                param=param, code="context_length_exceeded",
            )  # fmt: skip
        if limits.max_prompt_tokens is not None and len(ids) > limits.max_prompt_tokens:
            raise Refused(
                f"The prompt has {len(ids)} tokens; this server takes {limits.max_prompt_tokens}.", param=param
            )
        room = min(context - len(ids), limits.max_new_tokens or context)
        if max_tokens is not None and max_tokens > room:
            raise Refused(f"{max_tokens} new tokens are more than the {room} of this server.", param="max_tokens")
        return room if max_tokens is None else max_tokens

    async def _answered(
        self, http: HttpRequest, body: SamplingBody, reply: Reply, samples: list[SampledChoice], *, is_cut: bool = False
    ) -> Response:
        """is_cut: the samples may have to be ended here."""
        model, metrics = reply.model, self._metrics
        self.admit(body, samples)
        if not model.backend.is_ready:
            raise Refused(
                f"The engine of {model.name} is starting: ask again.",
                status=503, kind=UNAVAILABLE, code="engine_starting",
            )  # fmt: skip
        self._limits.check_room(metrics.num_in_flight, len(samples))
        if any(body.logit_bias.values()) and not model.is_sglang:
            reply.warnings.append(f"logit_bias has no effect: the engine of {model.name} has none")
        http.scope[SAMPLES] = samples
        is_streamed = body.stream or is_cut or bool(body.stops)
        answering = Answering(model.backend, samples, self._limits, stream=is_streamed)
        if body.stream:
            with_usage = body.stream_options.include_usage
            return _Events(self._events(answering, reply, with_usage), self._limits)
        with metrics.counted(model.name, samples):
            await unless_left(http, answering.run())
        return Response(to_json(reply.whole(samples)), media_type="application/json")

    async def _events(self, answering: Answering, reply: Reply, with_usage: bool) -> AsyncIterator[bytes]:
        samples, began = answering.samples, time.monotonic()
        ended: set[int] = set()
        has_begun = False
        with self._metrics.counted(reply.model.name, samples):
            try:
                if firsts := [choice for sample in samples for choice in reply.first(sample)]:
                    yield _event(reply.chunk(samples, firsts))
                async with aclosing(answering.parts()) as parts:
                    async for is_new in parts:
                        if not is_new:
                            yield b": keep-alive\n\n"
                            continue
                        for sample in samples:
                            if sample.index in ended:
                                continue
                            choices = reply.parts(sample, sample.answer.new())
                            if sample.answer.finish_reason is not None:
                                ended.add(sample.index)
                            for choice in choices:
                                yield _event(reply.chunk([sample], [choice]))
                        if not has_begun and any(sample.answer.num_tokens for sample in samples):
                            has_begun = True
                            self._metrics.first_token.labels(reply.model.name).observe(time.monotonic() - began)
                if with_usage:
                    yield _event(reply.chunk(samples, []) | {"usage": usage(samples)})
            except Exception as error:  # noqa: BLE001 - the reply has begun: the client hears of it in the stream
                yield _event(refusal_of(error).content())
        yield b"data: [DONE]\n\n"


class _Events(StreamingResponse):
    """Server-sent events that no proxy keeps back. A client that reads no longer, and does not leave, is left."""

    def __init__(self, events: AsyncIterator[bytes], limits: Limits) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._answering_s = limits.request_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with left_unless_read(self._answering_s):
            await super().__call__(scope, receive, send)


async def _parsed(form: type[Parsed], http: HttpRequest) -> Parsed:
    raw = await http.body()
    if len(raw) < LARGE_BODY_BYTES:
        return parse_body(form, raw)
    return await asyncio.to_thread(parse_body, form, raw)


def further_params(model: ServedModel, body: SamplingBody) -> dict[str, Any]:
    """Sampling parameters that SGLang alone knows. Raises Refused for them where it is not the engine."""
    params = {}
    for name, (neutral, wire_name) in SGLANG_SAMPLING.items():
        value = body.further.get(name, neutral)
        if value == neutral:
            continue
        if not model.is_sglang:
            raise Refused(f"{name} needs the engine sglang; {model.name} has another", param=name)
        params[wire_name] = value
    if model.is_sglang and body.logit_bias:
        params["logit_bias"] = body.logit_bias
    return params


def _grammar(model: ServedModel, body: ChatBody) -> dict[str, Any]:
    """Sampling fields that hold an answer to a form. Raises Refused for an engine without grammars."""
    form = body.response_format
    if form.type == "text":
        return {}
    if not model.is_sglang:
        raise Refused(
            f"response_format {form.type} needs an engine with grammars (--engine sglang); {model.name} has none",
            param="response_format",
        )
    schema = form.json_schema.schema_ if form.type == "json_schema" and form.json_schema else {"type": "object"}
    return {"json_schema": to_json(schema).decode()}


def _card(model: ServedModel) -> dict[str, Any]:
    """A model as /v1/models has it; from max_model_len on as vLLM has it, then our own."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "nanodag",
        "root": str(model.root),
        "max_model_len": model.context_length,
        "has_chat_template": model.renderer is not None,
        "weight_version": model.version(model.backend.weight_version),
    }


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"
