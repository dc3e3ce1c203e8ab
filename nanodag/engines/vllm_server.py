"""vLLM's engine behind SGLang's protocol: a server that runs by the Python of vLLM's environment, not by ours.

    python vllm_server.py '{"model": "DIR", ...}'    its description, as the embedded sampler's (`engine_settings.py`)

vLLM's own server has other words for all of it. Here its `AsyncLLM` stands behind the endpoints that the client knows,
and each of its workers is given `WeightReceiver` (`vllm_worker.py`), in which tensors come to a whole model first.

vLLM starts its parts with multiprocessing's `spawn`, which runs the top of this file again in each of them. Of nanodag
this file may import only what needs no more than torch, starlette and pydantic, which vLLM brings.

Source: vllm 0.32.0, v1/engine/async_llm.py, sampling_params.py, outputs.py, v1/worker/worker_base.py.
"""

import asyncio
import itertools
import json
import os
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[2])  # where nanodag is: not installed in vLLM's environment
_WAS_THERE = _ROOT in sys.path
if not _WAS_THERE:
    sys.path.append(_ROOT)
# ruff: noqa: E402 - what follows is found by that path, and what is not of nanodag is of vLLM's environment
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from nanodag.engines.vllm_answers import GREEDY_BELOW, completion, sampling_params
from nanodag.errors import BadRequest, SamplerError
from nanodag.host.threads import all_of
from nanodag.inference import protocol as p
from nanodag.inference import weight_bodies as w
from nanodag.inference.access_checks import HANDLERS, Doors, body_of, bound_socket, routes, unless_left
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.server_variables import end_with_starter, take_token
from nanodag.model.architecture import read_checkpoint
from nanodag.model.headers import ADAPTER_CONFIG, tensor_shapes
from nanodag.model.lora import read_adapter

if __name__ in ("__main__", "__mp_main__"):  # the server, and what it spawns
    end_with_starter()
if not _WAS_THERE:
    sys.path.remove(_ROOT)

DONE = {"success": True, "message": "Success"}
LEAST_TEMPERATURE = 0.01  # vLLM's own


class VllmServer:
    """State and actions behind the endpoints, in one event loop. engine: an AsyncLLM. facts: told of it. refusal: what
    it raises for a request that it does not take."""

    def __init__(
        self, engine: Any, settings: EngineSettings, facts: Mapping[str, Any], refusal: type[Exception]
    ) -> None:
        self.engine, self._facts, self._refusal = engine, facts, refusal
        self.folder, self.version = read_checkpoint(settings.base or settings.model), settings.weight_version
        self._shapes, self._has_base = tensor_shapes(self.folder.path), settings.base is not None
        self._adapters: dict[str, Any] = {"": None}  # by the names that requests give
        self._numbers = itertools.count()
        self._taken: set[str] = set()  # names of requests
        self._in_flight: set[str] = set()
        self._is_paused = False  # by a client, who alone ends it
        self._group = ""
        self._session: list[w.BucketBody] | None = None  # the last bucket that came; None where none is open
        self._one_at_a_time = asyncio.Lock()

    def application(self) -> Starlette:
        told = (self.health, self.health_generate, self.model_info, self.server_info)
        changed = (
            self.generate, self.pause_generation, self.continue_generation, self.abort_request,
            self.update_weights_from_disk, self.init_weights_update_group, self.destroy_weights_update_group,
            self.begin_weight_update, self.update_weights_from_distributed, self.update_weights_from_tensor,
            self.end_weight_update,
        )  # fmt: skip
        handlers = {**HANDLERS, BadRequest: self._failed, Exception: self._failed}
        return Starlette(routes=[*routes("GET", told), *routes("POST", changed)], exception_handlers=handlers)

    def _failed(self, http: HttpRequest, error: Exception) -> Response:
        if self.engine.errored:
            _end("vLLM's own processes are gone")
        status = 400 if isinstance(error, BadRequest) else 500
        return JSONResponse({"success": False, "message": str(error)}, status_code=status)

    async def generate(self, http: HttpRequest) -> Response:
        body = await body_of(http, p.GenerateBody)
        requests = [body.request(index, ids, f"vllm-{next(self._numbers)}") for index, ids in enumerate(body.prompts())]
        if body.incremental or (body.stream and len(requests) > 1):
            raise BadRequest("a stream is of one prompt here, and each event repeats all so far")
        for request in requests:
            self._check(request)
        self._taken |= {str(request.rid) for request in requests}
        if body.stream:
            return StreamingResponse(self._events(requests[0]), media_type="text/event-stream")
        groups = await unless_left(http, all_of(map(self._last, requests)))
        answers = [
            p.completion_to_wire(one, return_logprob=request.return_logprob)
            for request, group in zip(requests, groups, strict=True)
            for one in group
        ]
        return JSONResponse(answers if body.is_batch or requests[0].params.n > 1 else answers[0])

    def _check(self, request: p.Request) -> None:
        if isinstance(request.input_ids, str):
            raise BadRequest("text is for the embedded sampler and SGLang; send token ids")
        architecture, params = self.folder.architecture, request.params
        p.check_request(request, vocab_size=architecture.vocab_size, context_length=self._facts["context_length"])
        if request.return_logprob and params.temperature >= GREEDY_BELOW and (params.top_p < 1 or params.top_k != -1):
            raise BadRequest(
                f"top_p {params.top_p:g} and top_k {params.top_k} change the log-probabilities that vLLM tells: leave "
                "both out, or ask for none"
            )
        if GREEDY_BELOW <= params.temperature < LEAST_TEMPERATURE:
            raise BadRequest(f"temperature {params.temperature:g}: vLLM has 0, and {LEAST_TEMPERATURE:g} and above")
        if request.return_routed_experts:
            raise BadRequest("routed experts are for the other samplers: vLLM on a CPU cannot tell them")
        if request.lora_path not in self._adapters:
            raise BadRequest(f"lora_path {request.lora_path!r}: there are no such adapters here")
        if request.rid in self._taken:
            raise BadRequest(f"rid {request.rid!r} belongs to a request in flight: choose another")

    async def _last(self, request: p.Request) -> list[p.Completion]:
        found: dict[int, p.Completion] = {}
        async for part in self._parts(request, is_stream=False):
            found |= part
        is_one = request.params.temperature < GREEDY_BELOW
        return [found[0 if is_one else index] for index in range(request.params.n)]

    async def _events(self, request: p.Request) -> AsyncIterator[bytes]:
        """Server-sent events: each holds all of a sample so far; the last is [DONE]."""
        try:
            async with aclosing(self._parts(request, is_stream=True)) as parts:
                async for part in parts:
                    for index, one in part.items():
                        event = p.completion_to_wire(one, return_logprob=request.return_logprob) | {"index": index}
                        yield b"data: " + json.dumps(event).encode() + b"\n\n"
        except (BadRequest, SamplerError) as error:
            yield b"data: " + json.dumps({"error": {"message": str(error)}}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def _parts(self, request: p.Request, *, is_stream: bool) -> AsyncGenerator[dict[int, p.Completion]]:
        """Samples as they grow, or once when they have ended, by their index."""
        rid = str(request.rid)
        try:
            async with self._one_at_a_time:  # not in the midst of new weights
                self._in_flight.add(rid)
            prompt, adapter = {"prompt_token_ids": list(request.input_ids)}, self._adapters[request.lora_path]
            params = sampling_params(request, self.folder.eos_token_ids, self._facts, is_stream=is_stream)
            async with aclosing(self.engine.generate(prompt, params, rid, lora_request=adapter)) as outputs:
                async for output in outputs:
                    facts = {**self._facts, "weight_version": self.version}
                    yield {one.index: completion(request, output, one, facts) for one in output.outputs}
        except self._refusal as error:
            raise BadRequest(str(error)) from error
        finally:
            self._in_flight.discard(rid)
            self._taken.discard(rid)

    async def pause_generation(self, http: HttpRequest) -> Response:
        mode = (await body_of(http, p.PauseBody)).mode
        await self.engine.pause_generation(mode="abort" if mode == "abort" else "keep", clear_cache=mode != "in_place")
        self._is_paused = True  # now that nothing is computed: new weights may wait for it
        return JSONResponse(DONE)

    async def continue_generation(self, http: HttpRequest) -> Response:
        async with self._one_at_a_time:  # not in the midst of new weights
            self._is_paused = False
            await self.engine.resume_generation()
        return JSONResponse(DONE)

    async def abort_request(self, http: HttpRequest) -> Response:
        """End requests with what they have. An unknown rid is no error: it may just have finished."""
        body = await body_of(http, p.AbortBody)
        meant = [r for r in self._in_flight if body.abort_all or r == body.rid or r.startswith(f"{body.rid}_")]
        await self.engine.abort(meant)
        return Response()

    async def update_weights_from_disk(self, http: HttpRequest) -> Response:
        """Wait for requests in flight, unless they are paused, then read the folder, unless it is of no use."""
        body = await body_of(http, w.UpdateWeightsBody)
        folder = Path(body.model_path)
        if is_adapter := (folder / ADAPTER_CONFIG).is_file():
            change = partial(self.take_adapter, folder)
        else:
            self._check_shapes(tensor_shapes(folder))
            change = partial(self.engine.collective_rpc, "reload_weights", kwargs={"weights_path": str(folder)})
        async with self._one_at_a_time:
            if is_adapter and self._is_paused:  # what is paused keeps its own
                raise BadRequest("adapters come between requests, and generation is paused: continue it first")
            await self._change(change, body)
        return JSONResponse(DONE)

    def _check_shapes(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """Raise BadRequest where tensors of new weights are not the model's; a tied output head may be there."""
        tied = {"lm_head.weight"} if self.folder.architecture.tied else set()
        names = (self._shapes.keys() | found.keys()) - tied
        if differing := sorted(name for name in names if self._shapes.get(name) != found.get(name)):
            raise BadRequest(f"{differing[0]} is missing, unknown, not finite or misshapen: the old weights stay")

    async def take_adapter(self, folder: Path, name: str = "") -> None:
        """Answer who gives this name with the adapters in a folder. Raises BadRequest for those of no use."""
        from vllm.lora.request import LoRARequest

        if not (name or self._has_base):
            raise BadRequest(f"{folder} holds adapters, and this server was not started for them")
        read_adapter(folder)
        number = 1 + next(self._numbers)
        adapter = LoRARequest(str(number), number, str(folder))
        try:
            await self.engine.add_lora(adapter)
        except Exception as error:
            raise BadRequest(f"vLLM does not take the adapters in {folder}: {error}") from error
        self._adapters[name] = adapter

    async def init_weights_update_group(self, http: HttpRequest) -> Response:
        body = await body_of(http, w.InitGroupBody)
        if self._group:
            raise BadRequest(f"there is a group {self._group!r} already: destroy it first")
        await self._each("nanodag_join", body.model_dump_json())
        self._group = body.group_name
        return JSONResponse(DONE)

    async def destroy_weights_update_group(self, http: HttpRequest) -> Response:
        if (await body_of(http, w.DestroyGroupBody)).group_name != self._group:
            raise BadRequest("The group to be destroyed does not exist.")
        self._group = ""
        await self._each("nanodag_leave")
        return JSONResponse(DONE)

    async def begin_weight_update(self, http: HttpRequest) -> Response:
        body = await body_of(http, w.BeginUpdateBody)
        if self._session is not None:
            raise BadRequest("a weight-update session is already open; call end_weight_update() first")
        if body.lora_scale is not None:
            raise BadRequest("adapters alone come as a folder here: set weights.sync to disk")
        self._session = []
        return JSONResponse(DONE)

    async def update_weights_from_distributed(self, http: HttpRequest) -> Response:
        """Have each worker receive one broadcast of rank 0."""
        body = await body_of(http, w.ReceiveWeightsBody)
        if not self._group or body.group_name != self._group:
            raise BadRequest(f"there is no group {body.group_name!r}: call init_weights_update_group first")
        return await self._receive(body, [])

    async def update_weights_from_tensor(self, http: HttpRequest) -> Response:
        """Have each worker copy one bucket out of memory that the sender shares."""
        body = await body_of(http, w.ReceiveTensorsBody)
        return await self._receive(body, body.handles(self._facts["tp_size"]))

    async def _receive(self, body: w.BucketBody, handles: list[bytes]) -> Response:
        async with self._one_at_a_time:
            session, self._session = self._session, None  # which ends with a bucket that does not come
            if session is None:
                raise BadRequest("buckets must come between begin_weight_update() and end_weight_update()")
            await self._each("nanodag_receive", not session, handles, "" if handles else body.model_dump_json())
            self._session = [body]
        return JSONResponse(DONE)

    async def end_weight_update(self, http: HttpRequest) -> Response:
        """Load what came, if all of it did, between two tokens of what is paused or after requests in flight."""
        async with self._one_at_a_time:
            session, self._session = self._session, None
            if session is None:
                raise BadRequest("no weight-update session is open; call begin_weight_update() first")
            for last in session:
                if last.weight_version is None:
                    raise BadRequest("the last bucket, with a version, has not come: the old weights are kept")
                for found in await self.engine.collective_rpc("nanodag_shapes"):
                    self._check_shapes({name: tuple(shape) for name, shape in found.items()})
                await self._change(partial(self.engine.collective_rpc, "nanodag_load"), last)
        return JSONResponse(DONE)

    async def _change(self, change: Any, body: w.UpdateWeightsBody | w.BucketBody) -> None:
        """Change weights when requests in flight have ended, or are paused; what comes meanwhile waits. Where it fails
        other than by a refusal this process ends: they may be half of each."""
        if body.abort_all_requests:
            await self.engine.abort(list(self._in_flight))
        try:
            while self._in_flight and not self._is_paused:
                await asyncio.sleep(0.01)
            if body.flush_cache:
                await self.engine.reset_prefix_cache(reset_running_requests=self._is_paused)
            await change()
            if body.weight_version is not None:
                await self.engine.update_weight_version(body.weight_version)
                self.version = body.weight_version
        except BadRequest:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is
            _end(f"weights could not be changed, and may be half of each: {error}")

    async def _each(self, method: str, *arguments: Any) -> None:
        """A method of each worker. Raises BadRequest with the first thing that went wrong."""
        if failure := next(filter(None, await self.engine.collective_rpc(method, args=arguments)), ""):
            raise BadRequest(failure)

    async def health(self, http: HttpRequest) -> Response:
        return Response()

    async def health_generate(self, http: HttpRequest) -> Response:
        return Response(status_code=503 if await self.engine.is_paused() else 200)

    async def model_info(self, http: HttpRequest) -> Response:
        model, path = self.folder.architecture, str(self.folder.path)
        told = {"model_path": path, "is_generation": True, "weight_version": self.version, **self._facts}
        return JSONResponse(told | {"model_type": model.model_type, "architecture": asdict(model)})

    async def server_info(self, http: HttpRequest) -> Response:
        return JSONResponse(dict(self._facts))


def _end(reason: str) -> None:
    """End this process: clients hear of it by their broken connections."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)


async def serve(settings: EngineSettings, listener: socket.socket) -> None:
    """Answer until SIGTERM, or until vLLM's own processes are gone."""
    from vllm import AsyncEngineArgs, __version__
    from vllm.exceptions import VLLMClientError
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.engine.async_llm import AsyncLLM

    model = settings.base or settings.model
    width = read_checkpoint(model).architecture.head_dim
    sizes = cpu_attn.CPUAttentionBackend.get_supported_head_sizes()
    if settings.device == "cpu" and width not in sizes:  # it would end at the first request
        sys.exit(f"vLLM has no attention on a CPU for heads of {width}; it has {', '.join(map(str, sizes))}")
    has_tokenizer = any(model.glob("tokenizer*.json"))
    options = {name.replace("-", "_"): value for name, value in settings.options.items()}
    given: dict[str, Any] = {
        "model": str(model),
        "enable_lora": bool(settings.base or settings.adapters),
        # On a CPU vLLM gives a request without adapters those of the last place, which stays empty.
        "max_loras": 1 + len(settings.adapters),
        "max_lora_rank": 1 << max(3, (settings.lora_rank - 1).bit_length()),  # a few powers of two are taken
        "dtype": settings.dtype,
        "seed": settings.seed or 0,
        "max_model_len": settings.context_length,
        "max_num_seqs": settings.max_batch or 64,
        "tensor_parallel_size": settings.tensor_parallel,
        # It looks at a share even where bytes are said, and at what others have of the device.
        "gpu_memory_utilization": 0.01,
        "kv_cache_memory_bytes": None if "gpu_memory_utilization" in options else settings.cache_bytes,
        "skip_tokenizer_init": not has_tokenizer,
        "enforce_eager": settings.device == "cpu",
        "enable_chunked_prefill": settings.device != "cpu",  # it would take a seeded draw back, which a CPU cannot
        "logprobs_mode": "processed_logprobs",  # of what was drawn from: after the temperature
        "max_logprobs": p.MAX_TOP_LOGPROBS,
        "worker_extension_cls": "nanodag.engines.vllm_worker.WeightReceiver",  # of nanodag as it is loaded here
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        **options,
    }
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
    context, dtype = engine.model_config.max_model_len, str(engine.model_config.dtype).removeprefix("torch.")
    facts = {
        "engine": "vllm", "version": __version__, "dtype": dtype, "tp_size": settings.tensor_parallel,
        "context_length": context, "max_req_input_len": context - 1, "has_tokenizer": has_tokenizer,
        "disable_radix_cache": not given["enable_prefix_caching"],
    }  # fmt: skip
    await engine.update_weight_version(settings.weight_version)
    vllm = VllmServer(engine, settings, facts, VLLMClientError)
    own = {"": settings.model} if (settings.model / ADAPTER_CONFIG).is_file() else {}
    for name, adapter in {**own, **settings.adapters}.items():
        await vllm.take_adapter(adapter, name)
    doors = Doors(
        vllm.application(),
        names={settings.host, socket.gethostname()},
        keys=[token] if (token := take_token()) else (),
        max_body_bytes=settings.max_body_bytes,
    )
    listener.listen()
    settings.tell_port(listener.getsockname()[1])
    server = uvicorn.Server(uvicorn.Config(doors, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not serving.done():
        await asyncio.wait([serving], timeout=0.5)
        if engine.errored:
            _end("vLLM's own processes are gone")
    engine.shutdown()


if __name__ == "__main__":
    described = EngineSettings.model_validate_json(sys.argv[1])
    asyncio.run(serve(described, bound_socket(described.host, described.port, socket.AF_INET)))
