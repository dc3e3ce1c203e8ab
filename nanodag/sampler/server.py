"""The embedded sampler's HTTP application: SGLang's endpoints over one engine.

The event loop parses, validates and answers; the engine runs in a thread of its own (``loop.py``). A body that is wrong
in any way is answered with 400 and a reason in JSON, and nothing else happens. A client that goes away takes its
requests with it.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanodag.errors import BadRequest, SamplerError
from nanodag.sampler.engine import Engine
from nanodag.sampler.fingerprints import overall
from nanodag.sampler.loop import EngineLoop
from nanodag.sampler.protocol import (
    AbortBody,
    Body,
    Completion,
    ContinueBody,
    FinishReason,
    GenerateBody,
    PauseBody,
    Request,
    UpdateWeightsBody,
    WeightsCheckerBody,
    completion_to_wire,
    parse_body,
)
from nanodag.sampler.slots import Listener, Running
from nanodag.sampler.weights import fingerprint_checkpoint

log = logging.getLogger(__name__)
Result = TypeVar("Result")

CLIENT_CLOSED_REQUEST = 499
RANK_NAMES = ("tp_rank", "tp_size", "dp_rank", "dp_size", "pp_rank", "pp_size", "rank", "size")


class SamplerServer:
    """What lies behind the endpoints. Its coroutines run in one event loop, the engine in the loop's thread."""

    def __init__(self, engine: Engine, loop: EngineLoop) -> None:
        self.engine = engine
        self.loop = loop
        self._numbers = itertools.count()
        self._in_flight: set[str] = set()
        self._changed = asyncio.Condition()
        self._is_updating = False

    def application(self) -> Starlette:
        post, get = ["POST"], ["GET"]
        return Starlette(
            routes=[
                Route("/generate", self.generate, methods=post),
                Route("/update_weights_from_disk", self.update_weights_from_disk, methods=post),
                Route("/weights_checker", self.weights_checker, methods=post),
                Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
                Route("/pause_generation", self.pause_generation, methods=post),
                Route("/continue_generation", self.continue_generation, methods=post),
                Route("/abort_request", self.abort_request, methods=post),
                Route("/health", self.health, methods=get),
                Route("/model_info", self.model_info, methods=get),
                Route("/get_model_info", self.model_info, methods=get),
                Route("/get_server_info", self.server_info, methods=get),
                Route("/server_info", self.server_info, methods=get),
            ],
            exception_handlers={BadRequest: _refused, SamplerError: _failed, HTTPException: _http_error},
        )

    async def _in_loop(self, function: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self.loop.call(function))

    # ---- generate

    async def generate(self, http: HttpRequest) -> Response:
        body = await _parse(http, GenerateBody)
        requests = self._requests(body)
        for request in requests:
            self.engine.validate(request)
        await self._enter(requests)
        if body.stream:
            return await self._stream(body, requests)
        try:
            results = await self._run(http, requests)
        finally:
            await self._leave(requests)
        if results is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        samples = [(sample, request) for request, group in zip(requests, results, strict=True) for sample in group]
        for sample, _ in samples:
            if (failure := _failure(sample.finish_reason)) is not None:
                return failure
        answers = [completion_to_wire(sample, return_logprob=request.return_logprob) for sample, request in samples]
        is_single = not body.is_batch and requests[0].params.n == 1
        return Response(to_json(answers[0] if is_single else answers), media_type="application/json")

    def _requests(self, body: GenerateBody) -> list[Request]:
        requests = []
        for index, prompt in enumerate(body.prompts()):
            if isinstance(prompt, str):
                if self.engine.text is None:
                    raise BadRequest(f"text needs a tokenizer, and there is none in {self.engine.checkpoint.path}")
                prompt = self.engine.text.encode(prompt)
            rid = body.of_prompt("rid", index)
            requests.append(
                Request(
                    input_ids=prompt,
                    params=body.of_prompt("sampling_params", index),
                    rid=rid if rid is not None else f"embedded-{next(self._numbers)}",
                    return_logprob=body.of_prompt("return_logprob", index),
                )
            )
        return requests

    async def _enter(self, requests: list[Request]) -> None:
        """Wait while weights change, then count the requests as under way. Raises BadRequest for a rid in use."""
        rids = {request.rid for request in requests}
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_updating)
            if taken := rids & self._in_flight:
                raise BadRequest(f"rid {min(taken)!r} belongs to a request that is under way: choose another")
            self._in_flight |= rids

    async def _leave(self, requests: list[Request]) -> None:
        async with self._changed:
            self._in_flight -= {request.rid for request in requests}
            self._changed.notify_all()

    async def _run(self, http: HttpRequest, requests: list[Request]) -> list[list[Completion]] | None:
        """All samples of all requests, by request; None if the client went away before the last."""
        results: list[list[Any]] = [[None] * request.params.n for request in requests]
        num_missing = itertools.count(sum(len(group) for group in results) - 1, -1)
        finished = asyncio.get_running_loop().create_future()
        wake = asyncio.get_running_loop().call_soon_threadsafe

        def listener_of(group: list[Any]) -> Listener:
            def listen(index: int, completion: Completion) -> None:
                group[index] = completion
                if next(num_missing) == 0:
                    wake(_settle, finished)

            return listen

        running = await self._in_loop(
            lambda: [self.engine.submit(r, listener_of(g)) for r, g in zip(requests, results, strict=True)]
        )
        disconnected = asyncio.ensure_future(_disconnect(http))
        try:
            await asyncio.wait([finished, disconnected], return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnected.cancel()
            if not finished.done():
                self._drop(running)
        return results if finished.done() else None

    def _drop(self, running: list[Running]) -> None:
        members = set(map(id, running))
        self.loop.call(lambda: self.engine.abort(lambda other: id(other) in members, "the client went away"))

    async def _stream(self, body: GenerateBody, requests: list[Request]) -> Response:
        queue: asyncio.Queue[tuple[int, int, Completion]] = asyncio.Queue()
        wake = asyncio.get_running_loop().call_soon_threadsafe

        def listener_of(prompt: int) -> Listener:
            return lambda index, completion: wake(queue.put_nowait, (prompt, index, completion))

        try:
            running = await self._in_loop(
                lambda: [self.engine.submit(r, listener_of(p), stream=True) for p, r in enumerate(requests)]
            )
        except BaseException:
            await self._leave(requests)
            raise

        async def end() -> None:
            self._drop(running)
            await self._leave(requests)

        return _EventStream(self._events(body, requests, queue), end)

    async def _events(
        self, body: GenerateBody, requests: list[Request], queue: "asyncio.Queue[tuple[int, int, Completion]]"
    ) -> AsyncIterator[bytes]:
        """Server-sent events: each holds all of a sample so far; the last is [DONE]."""
        num_open = sum(request.params.n for request in requests)
        firsts = list(itertools.accumulate((request.params.n for request in requests), initial=0))
        is_single = not body.is_batch and num_open == 1
        while num_open:
            prompt, index, completion = await queue.get()
            num_open -= completion.finish_reason is not None
            event = completion_to_wire(completion, return_logprob=requests[prompt].return_logprob)
            if not is_single:
                event["index"] = firsts[prompt] + index
            yield b"data: " + to_json(event) + b"\n\n"
        yield b"data: [DONE]\n\n"

    # ---- weights, cache, pause, abort

    async def update_weights_from_disk(self, http: HttpRequest) -> Response:
        """Wait for requests under way (at once if paused), then change the weights. A bad path keeps the old ones."""
        try:
            body = await _parse(http, UpdateWeightsBody)
            path = Path(body.model_path)
            weights = await asyncio.to_thread(self.engine.load, path)
        except BadRequest as error:
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, status_code=400)
        if body.abort_all_requests:
            await self._in_loop(lambda: self.engine.abort(lambda running: True, "aborted by update_weights_from_disk"))
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_updating)
            self._is_updating = True
            try:
                await self._changed.wait_for(lambda: self.loop.is_paused or not self._in_flight)
                await self._in_loop(lambda: self.engine.update_weights(weights, path, body.weight_version))
            finally:
                self._is_updating = False
                self._changed.notify_all()
        message = "Succeeded to update model weights."
        if body.weight_version is not None:
            message += f" Weight version updated to {body.weight_version}."
        paused = len(self._in_flight) if self.loop.is_paused else 0
        return JSONResponse({"success": True, "message": message, "num_paused_requests": paused})

    async def weights_checker(self, http: HttpRequest) -> Response:
        """Fingerprints of the checkpoint that was loaded, once it is certain that its weights are those in memory.

        What is in memory has another layout, so the checkpoint is read again: it must still be there.
        """
        await _parse(http, WeightsCheckerBody)
        path = self.engine.checkpoint.path
        weights = await asyncio.to_thread(self.engine.load, path)
        differing = await self._in_loop(lambda: self.engine.model.weights.differing(weights))
        if differing:
            raise SamplerError(f"the weights in memory are not those of {path}: {', '.join(differing)} differ")
        found = await asyncio.to_thread(fingerprint_checkpoint, path)
        place = {name: int(name.endswith("size")) for name in RANK_NAMES}
        rank = {
            "checksums": found,
            "per_gpu_checksum": overall(found),
            "parallelism_info": [{"role": "target", **place}],
        }
        return JSONResponse({"success": True, "message": "Success.", "ranks": [rank]})

    async def flush_cache(self, http: HttpRequest) -> Response:
        def flush() -> bool:
            if self.engine.table.active.any():
                return False
            self.engine.forget_prompts()
            return True

        if await self._in_loop(flush):
            return PlainTextResponse("Cache flushed.\n")
        raise BadRequest("the cache is not flushed: samples are running on it; abort or retract them first")

    async def pause_generation(self, http: HttpRequest) -> Response:
        body = await _parse(http, PauseBody)
        await self._in_loop(lambda: self.loop.pause(body.mode))
        async with self._changed:
            self._changed.notify_all()
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: HttpRequest) -> Response:
        await _parse(http, ContinueBody)
        await self._in_loop(self.loop.resume)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def abort_request(self, http: HttpRequest) -> Response:
        """End requests with what they have. An unknown rid is no error: it may just have finished."""
        body = await _parse(http, AbortBody)

        def is_meant(running: Running) -> bool:
            # A rid given for a whole batch is that of its prompts with a number behind it.
            return body.abort_all or running.rid == body.rid or running.rid.startswith(f"{body.rid}_")

        await self._in_loop(lambda: self.engine.abort(is_meant, "aborted by abort_request"))
        return Response()

    # ---- looking

    async def health(self, http: HttpRequest) -> Response:
        return Response(status_code=200 if self.loop.is_alive and not self.loop.is_paused else 503)

    async def model_info(self, http: HttpRequest) -> Response:
        checkpoint = self.engine.checkpoint
        return JSONResponse(
            {
                "model_path": str(checkpoint.path),
                "tokenizer_path": str(checkpoint.path),
                "is_generation": True,
                "weight_version": self.engine.weight_version,
                "model_type": checkpoint.architecture.model_type,
                "architectures": list(checkpoint.class_names),
                "vocab_size": checkpoint.architecture.vocab_size,
                "context_length": self.engine.context_length,
                "has_tokenizer": self.engine.text is not None,
            }
        )

    async def server_info(self, http: HttpRequest) -> Response:
        engine = self.engine
        return JSONResponse(
            {
                "engine": "embedded",
                "dtype": engine.dtype_name,
                "device": str(engine.device),
                "deterministic": engine.model.deterministic,
                "max_running_requests": engine.num_slots,
                "context_length": engine.context_length,
                "max_total_num_tokens": engine.num_slots * engine.context_length,
                "num_running_samples": int(engine.table.active.sum()),
                "num_waiting_samples": len(engine.waiting),
                "num_generated_tokens": engine.num_generated_tokens,
                "is_paused": self.loop.is_paused,
                "weight_version": engine.weight_version,
            }
        )


class _EventStream(StreamingResponse):
    """Server-sent events that clean up however they end, also when the client leaves before the first one."""

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._end()


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


async def _disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _parse(http: HttpRequest, model: type[Body]) -> Body:
    raw = await http.body()
    try:
        content = from_json(raw, allow_inf_nan=False) if raw else {}
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadRequest(f"the body must be a JSON object, not a {type(content).__name__}")
    return parse_body(model, content)


def _failure(reason: FinishReason | None) -> Response | None:
    """The answer for a sample that failed through no fault of the request."""
    if reason is None or reason.status_code is None:
        return None
    return JSONResponse({"error": {"message": reason.message}}, status_code=reason.status_code)


def _refused(http: HttpRequest, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error), "type": "BadRequest"}}, status_code=400)


def _failed(http: HttpRequest, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error), "type": "SamplerError"}}, status_code=500)


def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": {"message": error.detail}}, status_code=error.status_code)
