"""The embedded sampler's HTTP application: SGLang's endpoints over one engine.

The event loop parses, validates and answers; the engine runs in a thread of its own (``engine_loop.py``). A body that
is wrong in any way is answered with 400 and a reason in JSON, and nothing else happens. A client that goes away takes
its requests with it.
"""

import asyncio
import itertools
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ExceptionHandler, Receive, Scope, Send

from nanodag import __version__
from nanodag.errors import BadRequest, SamplerError
from nanodag.host.processor import numerics
from nanodag.inference import protocol
from nanodag.inference.access_checks import HANDLERS, body_of, routes, unless_left
from nanodag.inference.protocol import Completion, GenerateBody, Request, completion_to_wire
from nanodag.sampler.device import held_memory, traced
from nanodag.sampler.engine import Engine
from nanodag.sampler.engine_loop import EngineLoop, Traffic
from nanodag.sampler.slots import ActiveRequest
from nanodag.sampler.weight_endpoints import WeightEndpoints


class SamplerServer:
    """State and actions behind the endpoints. Its coroutines run in one event loop, the engine in the loop's thread."""

    def __init__(self, engine: Engine, loop: EngineLoop, *, max_text_bytes: int) -> None:
        """max_text_bytes: of the prompts of one request that are given as text: a tokenizer takes seconds for a MB."""
        self.engine = engine
        self._max_text_bytes = max_text_bytes
        self._tokenizing = asyncio.Lock()
        self.loop = loop
        self._numbers = itertools.count()
        self._trace: ExitStack | None = None
        self.traffic = Traffic(loop)
        self.weights = WeightEndpoints(engine, self.traffic)

    @cached_property
    def _post(self) -> "_Post":
        """Made at first use: it belongs to the event loop that it is made in."""
        return _Post(asyncio.get_running_loop())

    def application(self) -> Starlette:
        told = (self.health, self.health_generate, self.model_info, self.server_info)
        changed = (
            self.generate, self.pause_generation, self.continue_generation, self.abort_request, self.start_profile,
            self.stop_profile, self.release_memory_occupation, self.resume_memory_occupation,
        )  # fmt: skip
        return Starlette(
            routes=[
                *routes("GET", told),
                *routes("POST", changed),
                *self.weights.routes(),
                Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
                Route("/get_model_info", self.model_info, methods=["GET"]),
                Route("/get_server_info", self.server_info, methods=["GET"]),
            ],
            exception_handlers={
                BadRequest: _answered(400, "BadRequest"),
                SamplerError: _answered(500, "SamplerError"),
                HTTPException: _http_error,
                **HANDLERS,
            },
        )

    async def generate(self, http: HttpRequest) -> Response:
        body = await body_of(http, GenerateBody)
        requests = await self._requests(body)
        for request in requests:
            self.engine.validate(request)
        rids = {request.rid for request in requests if request.rid is not None}
        await self.traffic.enter(rids)
        if body.stream:
            return await self._stream(body, requests, rids)
        try:
            results = await self._run(http, requests)
        finally:
            await self.traffic.leave(rids)
        samples = [(sample, request) for request, group in zip(requests, results, strict=True) for sample in group]
        for sample, _ in samples:
            reason = sample.finish_reason
            if reason is not None and reason.status_code is not None:  # it failed through no fault of the request
                return JSONResponse({"error": {"message": reason.message}}, status_code=reason.status_code)
        answers = [completion_to_wire(sample, return_logprob=request.return_logprob) for sample, request in samples]
        is_single = not body.is_batch and requests[0].params.n == 1
        return Response(to_json(answers[0] if is_single else answers), media_type="application/json")

    async def _requests(self, body: GenerateBody) -> list[Request]:
        requests = []
        prompts = body.prompts()
        num_bytes = sum(len(prompt.encode(errors="replace")) for prompt in prompts if isinstance(prompt, str))
        if num_bytes > self._max_text_bytes:
            raise BadRequest(
                f"the text has {num_bytes} bytes, above {self._max_text_bytes}: send token ids, or less at once, or "
                "raise --max-text-bytes"
            )
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                if self.engine.text is None:
                    raise BadRequest(f"text needs a tokenizer, and there is none in {self.engine.checkpoint.path}")
                async with self._tokenizing:  # off the event loop, one at a time: the others' requests go on
                    prompt = await asyncio.to_thread(self.engine.text.encode, prompt)
            requests.append(body.request(index, prompt, f"embedded-{next(self._numbers)}"))
        return requests

    async def _run(self, http: HttpRequest, requests: list[Request]) -> list[list[Completion]]:
        """Wait for all samples of all requests, by request. Raises Left where the client went away before the last."""
        results: list[list[Any]] = [[None] * request.params.n for request in requests]
        num_missing = itertools.count(sum(len(group) for group in results) - 1, -1)
        finished = asyncio.Event()
        wake = asyncio.get_running_loop().call_soon_threadsafe

        def listen(group: list[Any], index: int, completion: Completion) -> None:
            group[index] = completion
            if next(num_missing) == 0:
                wake(finished.set)

        running = await self.traffic.in_loop(
            lambda: [self.engine.submit(r, partial(listen, g)) for r, g in zip(requests, results, strict=True)]
        )
        try:
            await unless_left(http, finished.wait())
        except BaseException:
            self._drop(running)
            raise
        return results

    def _drop(self, running: list[ActiveRequest]) -> None:
        # Held until then: the id of one that has ended and is gone may be another client's by the time of the abort.
        members = {id(request): request for request in running}
        self.loop.call(lambda: self.engine.abort(lambda other: id(other) in members, "the client went away"))

    async def _stream(self, body: GenerateBody, requests: list[Request], rids: set[str]) -> Response:
        queue: asyncio.Queue[tuple[int, int, Completion]] = asyncio.Queue()
        post = self._post

        def listen(prompt: int, index: int, completion: Completion) -> None:
            post.send(queue, (prompt, index, completion))

        try:
            running = await self.traffic.in_loop(
                lambda: [
                    self.engine.submit(r, partial(listen, p), stream=True, tells_once=body.incremental)
                    for p, r in enumerate(requests)
                ]
            )
        except BaseException:
            await self.traffic.leave(rids)
            raise

        have_ended = asyncio.Event()

        async def end() -> None:
            if not have_ended.is_set():
                self._drop(running)
            await self.traffic.leave(rids)

        return _EventStream(self._events(body, requests, queue, have_ended), end)

    async def _events(
        self,
        body: GenerateBody,
        requests: list[Request],
        queue: "asyncio.Queue[tuple[int, int, Completion]]",
        have_ended: asyncio.Event,
    ) -> AsyncIterator[bytes]:
        """Server-sent events: each holds all of a sample so far, or what is new; the last is [DONE]."""
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
            if not queue.empty():
                await asyncio.sleep(0)  # lets the loop see that the client has left
        have_ended.set()
        yield b"data: [DONE]\n\n"

    async def flush_cache(self, http: HttpRequest) -> Response:
        def flush() -> None:
            if self.engine.table.active.any():
                raise BadRequest("the cache is not flushed: samples are running on it; abort or retract them first")
            self.engine.forget_prompts()

        await self.traffic.in_loop(flush)
        return PlainTextResponse("Cache flushed.\n")

    async def pause_generation(self, http: HttpRequest) -> Response:
        body = await body_of(http, protocol.PauseBody)
        await self.traffic.in_loop(lambda: self.loop.pause(body.mode))
        await self.traffic.leave(set())
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: HttpRequest) -> Response:
        await body_of(http, protocol.ContinueBody)
        await self.traffic.in_loop(self.loop.resume)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def abort_request(self, http: HttpRequest) -> Response:
        """End requests with what they have. An unknown rid is no error: it may just have finished."""
        body = await body_of(http, protocol.AbortBody)

        def is_meant(running: ActiveRequest) -> bool:
            # A rid given for a whole batch is that of its prompts with a number behind it.
            return body.abort_all or running.rid == body.rid or running.rid.startswith(f"{body.rid}_")

        await self.traffic.in_loop(lambda: self.engine.abort(is_meant, "aborted by abort_request"))
        return Response()

    async def release_memory_occupation(self, http: HttpRequest) -> Response:
        """Free the memory of weights, cache or both. Refused while samples run or wait, where SGLang ends."""
        body = await body_of(http, protocol.MemoryBody)
        await self.traffic.in_loop(lambda: self.engine.release_memory(body.tags))
        return Response()

    async def resume_memory_occupation(self, http: HttpRequest) -> Response:
        """Take it again; weights are to come after."""
        body = await body_of(http, protocol.MemoryBody)
        await self.traffic.in_loop(lambda: self.engine.resume_memory(body.tags))
        return Response()

    async def start_profile(self, http: HttpRequest) -> Response:
        """Begin the one trace, of the engine's thread by torch. Its folder must be there: nobody makes one through this
        door."""
        folder = Path((await body_of(http, protocol.StartProfileBody)).output_dir)
        if self._trace is not None:
            raise BadRequest("a trace is under way; end it with /stop_profile first")
        if not folder.is_absolute() or not folder.is_dir():
            raise BadRequest(f"output_dir {str(folder)!r:.200} is not the absolute path of a folder")
        trace = self._trace = ExitStack()
        path = folder / f"sampler-{os.getpid()}.trace.json.gz"
        try:
            await self.traffic.in_loop(lambda: trace.enter_context(traced(path)))
        except BaseException:
            self._trace = None  # it has not begun, and may be asked for again
            raise
        return PlainTextResponse("Start profiling.\n")

    async def stop_profile(self, http: HttpRequest) -> Response:
        """End it, and write its file."""
        await body_of(http, protocol.EmptyBody)
        if self._trace is None:
            raise BadRequest("no trace is under way; begin one with /start_profile")
        trace, self._trace = self._trace, None
        await self.traffic.in_loop(trace.close)
        return PlainTextResponse("Stop profiling.\n")

    async def health(self, http: HttpRequest) -> Response:
        """200 as long as the loop lives, also while it is paused and a balancer must not drop it."""
        return Response(status_code=200 if self.loop.is_alive else 503)

    async def health_generate(self, http: HttpRequest) -> Response:
        """200 where a request would be answered now."""
        is_able = self.loop.is_alive and not self.loop.is_paused and self.engine.model.is_whole
        return Response(status_code=200 if is_able else 503)

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
                "architecture": asdict(checkpoint.architecture),
                "context_length": self.engine.context_length,
                "has_tokenizer": self.engine.text is not None,
            }
        )

    async def server_info(self, http: HttpRequest) -> Response:
        engine = self.engine
        return JSONResponse(
            {
                "engine": "embedded",
                "version": __version__,
                "numerics": numerics(torch.__version__),
                "dtype": engine.dtype_name,
                "device": str(engine.device),
                "deterministic": engine.model.deterministic,
                "max_running_requests": engine.num_slots,
                "context_length": engine.context_length,
                "max_total_num_tokens": engine.num_slots * engine.context_length,
                "num_running_samples": int(engine.table.active.sum()),
                "num_waiting_samples": len(engine.waiting),
                "is_paused": self.loop.is_paused,
                "released": sorted(engine.released),
                "memory": held_memory(engine.device),
                "weight_version": engine.weight_version,
            }
        )


class _EventStream(StreamingResponse):
    """A stream that cleans up however it ends, also when the client leaves before its first event."""

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._end()


class _Post:
    """Messages of the engine's thread to coroutines. The event loop is woken once for all that it is told in a step: a
    wake is a system call, and dearer than what there is to tell."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._is_woken = loop, False
        self._letters: deque[tuple[asyncio.Queue[Any], Any]] = deque()

    def send(self, queue: "asyncio.Queue[Any]", letter: object) -> None:
        """Add a message, from the engine's thread."""
        self._letters.append((queue, letter))
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # before it looks: what is sent from here on wakes again
        while self._letters:
            queue, letter = self._letters.popleft()
            queue.put_nowait(letter)


def _answered(status: int, kind: str) -> ExceptionHandler:
    return lambda http, error: JSONResponse({"error": {"message": str(error), "type": kind}}, status_code=status)


def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": {"message": error.detail}}, status_code=error.status_code)
