"""SGLang's own protocol, passed on to an engine: the same process speaks both.

POST /generate, GET /model_info, /get_model_info, /server_info, /get_server_info and /health_generate, of the model that
`?model=NAME` names, else of the first. What changes weights or ends the requests of others is not passed on.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from nanodag.api.engines import Engines
from nanodag.api.leaving import unless_left
from nanodag.api.refusals import Refused
from nanodag.api.served_model import Limits, ServedModel
from nanodag.errors import SamplerLost
from nanodag.inference.client import LOST

READ = ("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/health_generate")


def passed_on(models: Mapping[str, ServedModel], limits: Limits) -> list[Route]:
    """The routes. Every model's backend is an `Engines`."""

    def model_of(http: HttpRequest) -> ServedModel:
        name = http.query_params.get("model") or next(iter(models))
        if name not in models:
            raise Refused(f"There is no model {name[:200]!r} here.", status=404, param="model", code="model_not_found")
        return models[name]

    async def read(http: HttpRequest) -> Response:
        return await _forward(model_of(http), "GET", http.url.path, None)

    async def generate(http: HttpRequest) -> Response:
        model = model_of(http)
        raw = await http.body()
        num_samples = _num_samples(raw, model)
        if num_samples > limits.max_waiting:
            raise Refused(
                f"{num_samples} answers are more than the {limits.max_waiting} that may be under way here: ask for "
                "fewer at once, or raise --max-waiting.",
                param="n",
            )
        assert isinstance(model.backend, Engines)
        if model.backend.load + num_samples > limits.max_waiting:
            raise Refused(
                f"{model.backend.load} answers are under way or wait, and {num_samples} more would be above "
                f"{limits.max_waiting}: ask again later.",
                status=429, kind="rate_limit_error", code="queue_full",
            )  # fmt: skip
        async with asyncio.timeout(limits.request_timeout_s):
            return await unless_left(http, _forward(model, "POST", "/generate", raw, num_samples))

    return [*(Route(path, read, methods=["GET"]) for path in READ), Route("/generate", generate, methods=["POST"])]


def _num_samples(raw: bytes, model: ServedModel) -> int:
    """The answers that a request asks for. Raises Refused for what would end a whole engine."""
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    ids, text = body.get("input_ids"), body.get("text")
    prompts: list[Any] = text if isinstance(text, list) else [text]
    if ids is not None:
        prompts = ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else [ids]
        for prompt in prompts:
            is_list = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
            if not is_list or min(prompt) < 0 or max(prompt) >= model.vocab_size:
                raise Refused(f"input_ids are not ids of a vocabulary of {model.vocab_size}", param="input_ids")
    params = body.get("sampling_params") or {}
    given = [one.get("n") for one in (params if isinstance(params, list) else [params]) if isinstance(one, dict)]
    return len(prompts) * max([1, *(n for n in given if isinstance(n, int))])


async def _forward(model: ServedModel, method: str, path: str, body: bytes | None, load: int = 1) -> Response:
    engines = model.backend
    assert isinstance(engines, Engines)
    replica = engines.least_busy()
    replica.load += load
    try:
        answer = await replica.client.open(method, path, body)
    except BaseException:
        replica.load -= load
        raise

    async def content() -> AsyncIterator[bytes]:
        try:
            async for block in answer.content.iter_any():
                yield block
        except LOST as error:
            raise SamplerLost(f"the engine of {model.name} was lost") from error
        finally:
            answer.close()
            replica.load -= load

    kind: Any = answer.headers.get("content-type", "application/json")
    return StreamingResponse(content(), status_code=answer.status, media_type=kind)
