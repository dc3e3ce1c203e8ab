"""SGLang's own protocol, passed on to an engine: the same process speaks both.

POST /generate, GET /model_info, /get_model_info, /server_info, /get_server_info and /health_generate, of the model that
`?model=NAME` names, else of the first. What changes weights or ends the requests of others is not passed on.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanodag.api.refusals import Refused
from nanodag.api.served_model import Limits, ServedModel, model_named
from nanodag.engines.fleet import Fleet
from nanodag.errors import SamplerLost
from nanodag.inference.access_checks import left_unless_read, unless_left
from nanodag.inference.client import LOST
from nanodag.inference.protocol import SamplingParams, json_object
from nanodag.tokenizer.bounds import TooManyTokens, bounded

READ = ("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/health_generate")


def passed_on(models: Mapping[str, ServedModel], limits: Limits) -> list[Route]:
    """The routes. Every model's backend is a `Fleet`."""

    async def read(http: HttpRequest) -> Response:
        return _Passed(model_named(models, http.query_params.get("model", "")), limits, "GET", http.url.path)

    async def generate(http: HttpRequest) -> Response:
        model = model_named(models, http.query_params.get("model", ""))
        raw = await http.body()
        body = json_object(raw)
        prompts, given = _prompts(body, model), body.get("sampling_params") or {}
        # One set for all prompts, or one each.
        params = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, dict)]
        num_samples = len(prompts) * max([1, *(n for param_set in params if isinstance(n := param_set.get("n"), int))])
        limits.check_count(num_samples, f"{num_samples} answers")
        _check_new_tokens(params, limits)
        with bounded(limits.max_prompt_tokens or model.context_length):
            await unless_left(http, asyncio.to_thread(_check_prompt_tokens, prompts, model, limits))
        assert isinstance(model.backend, Fleet)
        limits.check_room(model.backend.load, num_samples)
        if body.get("lora_path"):
            raise Refused("adapters are chosen by ?model=NAME: leave lora_path out", param="lora_path")
        if model.lora_path:
            raw = to_json(body | {"lora_path": model.lora_path})
        return _Passed(model, limits, "POST", "/generate", raw, num_samples)

    return [*(Route(path, read, methods=["GET"]) for path in READ), Route("/generate", generate, methods=["POST"])]


def _prompts(body: Mapping[str, Any], model: ServedModel) -> list[Any]:
    """Texts or lists of ids. Raises Refused for ids that would end a whole engine."""
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None:
        return text if isinstance(text, list) else [text]
    prompts: list[Any] = ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else [ids]
    for prompt in prompts:
        is_list = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
        if not is_list or min(prompt) < 0 or max(prompt) >= model.vocab_size:
            raise Refused(f"input_ids are not ids of a vocabulary of {model.vocab_size}", param="input_ids")
    return prompts


def _check_new_tokens(params: Sequence[Mapping[str, Any]], limits: Limits) -> None:
    if limits.max_new_tokens is None:
        return
    default = SamplingParams().max_new_tokens
    for most in (param_set.get("max_new_tokens", default) for param_set in params):
        if not isinstance(most, int) or most > limits.max_new_tokens:
            raise Refused(
                f"sampling_params: max_new_tokens is {str(most)[:80]} ({default} where it is not given); this server "
                f"allows {limits.max_new_tokens}.",
                param="sampling_params",
            )


def _check_prompt_tokens(prompts: Sequence[Any], model: ServedModel, limits: Limits) -> None:
    """Texts are counted by this side's tokenizer, which is the engine's."""
    if limits.max_prompt_tokens is None:
        return
    for prompt in prompts:
        try:
            ids = model.tokens.prompt_ids(prompt, special=True) if isinstance(prompt, str) else prompt
        except TooManyTokens as error:
            raise Refused(f"A prompt has more than the {limits.max_prompt_tokens} tokens of this server.") from error
        if isinstance(ids, list) and len(ids) > limits.max_prompt_tokens:
            raise Refused(f"A prompt has {len(ids)} tokens; this server takes {limits.max_prompt_tokens}.")


class _Passed(Response):
    """Stream an engine's answer to a request, as it comes. The engine counts it as load until its last byte is sent, or
    whoever asked has left. load: samples that it asks for."""

    def __init__(
        self, model: ServedModel, limits: Limits, method: str, path: str, content: bytes | None = None, load: int = 1
    ) -> None:
        super().__init__()
        self._model, self._limits, self._load = model, limits, load
        self._request = (method, path, content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engines = self._model.backend
        assert isinstance(engines, Fleet)
        replica = await engines.choose()
        replica.load += self._load
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                opening = replica.client.open(*self._request)
                answer = await unless_left(HttpRequest(scope, receive), opening)
            try:
                kind = answer.headers.get("content-type", "application/json")
                streamed = StreamingResponse(self._content(answer), status_code=answer.status, media_type=kind)
                async with left_unless_read(self._limits.request_timeout_s):
                    await streamed(scope, receive, send)
            finally:
                answer.close()
        finally:
            replica.load -= self._load

    async def _content(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        try:
            async for block in answer.content.iter_any():
                yield block
        except LOST as error:
            raise SamplerLost(f"the engine of {self._model.name} was lost") from error
