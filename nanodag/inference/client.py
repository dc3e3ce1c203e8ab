"""Asynchronous client of a sampler over HTTP: the embedded one, SGLang or vLLM.

    async with SamplerClient(url) as sampler:
        (completions,) = await sampler.generate([Request(input_ids=[1, 2, 3], params=SamplingParams(n=8))])

Errors: BadRequest (the sampler refuses, and will refuse again), SamplerLost (it died, hung or cannot be reached; the
same request may succeed after a restart), SamplerError (it failed at this request and lives).
"""

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import aiohttp
import orjson
from pydantic_core import from_json

from nanodag.errors import BadRequest, NanodagError, SamplerError, SamplerLost
from nanodag.inference.protocol import (
    Completion,
    MemoryTag,
    PauseMode,
    Request,
    SamplingParams,
    check_request,
    completion_from_wire,
)
from nanodag.inference.weight_bodies import Bucket

# Below the 5 s after which SGLang closes an idle connection: a request must not be sent into one that is closing.
KEEPALIVE_EXPIRY_S = 2.0
OK = HTTPStatus.OK
LOST = (aiohttp.ClientError, TimeoutError, OSError)

REFUSALS = (400, 401, 403, 413, 421, 422)  # it will refuse the same again
TABLES = ("/model_info", "/server_info")  # every sampler has them: what does not, or sends one elsewhere, is none
MAY_PASS = (408, 425, 429)


class AskingAgain(aiohttp.TCPConnector):
    """Tries once more to connect after a time-out. Nothing was sent by then; and where this process was not running
    meanwhile, it finds the time over before it looks at a connection that is up."""

    async def connect(self, *args: Any, **named: Any) -> aiohttp.connector.Connection:
        try:
            return await super().connect(*args, **named)
        except TimeoutError:
            return await super().connect(*args, **named)


class SamplerClient(AbstractAsyncContextManager["SamplerClient"]):
    """One sampler. Any number of its coroutines may run at once in one event loop."""

    def __init__(
        self,
        url: str,
        *,
        request_timeout_s: float = 600.0,
        connect_timeout_s: float = 5.0,
        vocab_size: int | None = None,
        context_length: int | None = None,
        token: str = "",
        is_embedded: bool = False,
        num_ranks: int = 1,
    ) -> None:
        """request_timeout_s: silence after which the sampler counts as lost. token: that the sampler wants to see.
        is_embedded: its streams tell each token once; other engines repeat all so far in each event. num_ranks:
        processes that share its model, each a member of a group of weights.

        vocab_size and context_length: if given, requests are checked against them before they are sent. SGLang needs
        that: an id outside the vocabulary ends its server.
        """
        self.url = url.rstrip("/")
        self._limits = None if vocab_size is None or context_length is None else (vocab_size, context_length)
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=request_timeout_s)
        self.token = token
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self.is_closed = False
        self._is_embedded = is_embedded
        self.lora_path = ""  # of requests that name no adapters
        self.num_ranks = num_ranks
        self._responses: WeakSet[aiohttp.ClientResponse] = WeakSet()  # whose bodies may still come

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End requests in flight. Later callers get SamplerLost: the server that they knew has been replaced."""
        self.is_closed = True
        for response in list(self._responses):
            _give_up(response)
        if self._session is not None:
            await self._session.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        """Made at first use: it belongs to the event loop that it is made in. No proxy of the environment is used."""
        self._check_open()
        if self._session is None:
            connector = AskingAgain(limit=0, keepalive_timeout=KEEPALIVE_EXPIRY_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
        return self._session

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """For each request its n completions. All are sent at once, and answered when the last is done."""
        if not requests:
            return []
        for request in requests:
            self.check(request)
        content = await self._call("POST", "/generate", _body_of(requests, self.lora_path))
        with self._understood("/generate"):
            answers = _parsed(content)
            completions = [
                completion_from_wire(answer) for answer in (answers if isinstance(answers, list) else [answers])
            ]
        for completion in completions:
            _raise_failure(completion)
        expected = sum(request.params.n for request in requests)
        if len(completions) != expected:
            raise SamplerError(f"{self.url} answered {len(completions)} samples where {expected} were asked for")
        remaining = iter(completions)
        return [[next(remaining) for _ in range(request.params.n)] for request in requests]

    async def prompt_ids(self, text: str) -> list[int]:
        """Tokens that the sampler's own tokenizer makes of a text."""
        params = params_to_wire(SamplingParams(max_new_tokens=1))
        body = {"text": text, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        return list(completion_from_wire(from_json(await self._call("POST", "/generate", body))).prompt_ids)

    async def stream(self, request: Request) -> AsyncGenerator[Completion, None]:
        """One sample, as it grows: each item holds all of it so far, the last has a finish reason. n must be 1."""
        if request.params.n != 1:
            raise BadRequest(f"a stream is of one sample, not of n={request.params.n}")
        self.check(request)
        body = _body_of([request], self.lora_path) | {"stream": True}
        body |= {"incremental": True} if self._is_embedded else {}
        so_far: Completion | None = None
        with self._reached("/generate"):
            async with self._http.post(f"{self.url}/generate", json=body, allow_redirects=False) as response:
                self._keep(response)
                if response.status != OK:
                    self._raise_for("/generate", response.status, await response.read())
                async for event in self._events(response.content):
                    part = completion_from_wire(event)
                    _raise_failure(part)
                    so_far = part if so_far is None or not self._is_embedded else _joined(so_far, part)
                    yield so_far

    async def _events(self, content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream. Its own lines may not be longer than its buffer."""
        rest = b""
        async for block in content.iter_any():
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if line.startswith(b"data: ") and line.rstrip() != b"data: [DONE]":
                    event = from_json(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise SamplerError(f"{self.url} failed in a stream: {event['error']}")
                    yield event

    async def update_weights_from_disk(self, path: str, version: str | int, *, flush_cache: bool = True) -> None:
        """Sample with the checkpoint in the folder ``path`` from now on. BadRequest: the old weights are kept."""
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": flush_cache}
        await self._call("POST", "/update_weights_from_disk", body)

    def begins_with(self, folder: Path, version: str | int) -> None:
        """Hear of the weights that its server was started with."""

    async def join_weight_group(
        self, *, name: str, port: int, rank: int, size: int, address: str = "127.0.0.1", backend: str = "gloo"
    ) -> None:
        """Become a member, from `rank` on, of the group whose rank 0 waits at the address and port; answered when all
        are there. backend: gloo or nccl."""
        body = {"master_address": address, "master_port": port, "rank_offset": rank, "world_size": size}
        await self._call("POST", "/init_weights_update_group", {**body, "group_name": name, "backend": backend})

    async def leave_weight_group(self, name: str) -> None:
        await self._call("POST", "/destroy_weights_update_group", {"group_name": name})

    async def begin_weight_update(self, lora_scale: float | None = None) -> None:
        """Get ready to receive weights; `end_weight_update` makes them those that it samples with. lora_scale: of
        adapters, where they come alone; for the embedded engine."""
        await self._call("POST", "/begin_weight_update", {} if lora_scale is None else {"lora_scale": lora_scale})

    async def receive_weights(
        self, bucket: Bucket, *, group: str, version: str | int | None = None, flush_cache: bool = True
    ) -> None:
        """Take part in one broadcast of the group's rank 0. version: of the whole, with its last bucket; flush_cache:
        forget then what is cached of prompts."""
        body = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "group_name": group}
        await self._send_bucket("/update_weights_from_distributed", body, version, flush_cache)

    async def take_weights(
        self, handles: Sequence[str], *, version: str | int | None = None, flush_cache: bool = True
    ) -> None:
        """Copy a bucket that lies in shared memory. handles: one for each of its ranks, as `shared_tensors` makes them;
        version, flush_cache: as of `receive_weights`."""
        body = {"serialized_named_tensors": list(handles)}
        await self._send_bucket("/update_weights_from_tensor", body, version, flush_cache)

    async def _send_bucket(self, path: str, body: dict[str, Any], version: str | int | None, flush_cache: bool) -> None:
        body |= {"load_format": "flattened_bucket", "flush_cache": flush_cache and version is not None}
        body |= {"weight_version": str(version)} if version is not None else {}
        await self._call("POST", path, body)

    async def end_weight_update(self) -> None:
        await self._call("POST", "/end_weight_update", {})

    async def fingerprints(self) -> list[dict[str, str]]:
        """Fingerprints of its weights, by tensor name; one dict a rank. See ``sampler/fingerprints.py``."""
        answer = await self._call("POST", "/weights_checker", {"action": "checksum"})
        with self._understood("/weights_checker"):
            return [dict(rank["checksums"]) for rank in from_json(answer)["ranks"]]

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two tokens. ``abort`` ends what runs; ``retract`` and ``in_place`` go on after ``resume``."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Give back the memory of what the tags name. Nothing may be in flight: SGLang would end. Until `resume_memory`
        nothing can be sampled, and no weights be taken without memory for them."""
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory again; what was in it is lost. SGLang ends at tags that were not released."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)})

    async def memory(self) -> dict[str, int]:
        """Bytes of its device that it holds: `bytes` now, and the most since this was asked last, `peak_bytes`. SGLang
        says what it holds while nothing is released, and that alone."""
        info = from_json(await self._call("GET", "/server_info"))
        if "memory" in info:
            return dict(info["memory"])
        usages = [state.get("memory_usage", {}) for state in info.get("internal_states") or ()]
        parts = [
            [usage.get("weight", 0.0), usage.get("kvcache", 0.0), *_numbers(usage.get("graph"))] for usage in usages
        ]
        return {"peak_bytes": int(sum(map(sum, parts)) * (1 << 30))} if parts else {}

    async def abort(self, rid: str | None = None) -> None:
        """End the request of that name with what it has; all of them without a name."""
        await self._call("POST", "/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def start_profile(self, folder: Path) -> None:
        """Begin a torch trace that goes into a folder of the sampler's machine. Raises BadRequest for one that is not
        there, or where a trace is under way."""
        await self._call("POST", "/start_profile", {"output_dir": str(folder)})

    async def stop_profile(self) -> None:
        """End it; its file is written, by SGLang some time later."""
        await self._call("POST", "/stop_profile", {})

    async def health(self, *, generates: bool = True) -> bool:
        """True: it generates. False: it lives but is paused or starting. Raises SamplerLost if it does not answer.
        generates: False to ask whether it lives alone; SGLang answers the other question by generating."""
        self._check_open()
        path = "/health_generate" if generates else "/health"
        # Over a connection of its own: one that was open may have been lost.
        own = aiohttp.ClientSession(connector=AskingAgain(), timeout=self._timeout, headers=self._headers)
        with self._reached(path):
            async with own, own.get(self.url + path, allow_redirects=False) as response:
                return response.status == OK

    async def model_info(self) -> dict[str, Any]:
        """Table of its model: model_path, weight_version and more."""
        return await self._table(TABLES[0])

    async def server_info(self) -> dict[str, Any]:
        """Table of the sampler itself: dtype, context_length, version and more."""
        return await self._table(TABLES[1])

    async def _table(self, path: str) -> dict[str, Any]:
        """Raises BadRequest where something that is no sampler answers."""
        content = await self._call("GET", path)
        try:
            with self._understood(path):
                return dict(from_json(content).items())
        except SamplerError as error:
            raise BadRequest(str(error)) from error

    async def open(self, method: str, path: str, body: bytes | None) -> aiohttp.ClientResponse:
        """The sampler's answer as it comes, whatever its status. Whoever asks closes it. Raises SamplerLost."""
        with self._reached(path):
            headers = {"content-type": "application/json"}
            response = await self._http.request(method, self.url + path, data=body, headers=headers)
        self._keep(response)
        return response

    def _keep(self, response: aiohttp.ClientResponse) -> None:
        """Have `close` end whoever reads its body."""
        self._responses.add(response)
        if self.is_closed:  # since its header came
            _give_up(response)

    def _check_open(self) -> None:
        if self.is_closed:
            raise SamplerLost(f"the connection to {self.url} was closed")

    def check(self, request: Request) -> None:
        """Raise BadRequest for what is outside of vocab_size or context_length."""
        if self._limits is not None:
            vocab_size, context_length = self._limits
            images = self._is_embedded
            check_request(request, vocab_size=vocab_size, context_length=context_length, takes_images=images)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        with self._reached(path):
            async with self._http.request(method, self.url + path, json=body, allow_redirects=False) as response:
                self._keep(response)
                content = await response.read()
        if response.status != OK:
            self._raise_for(path, response.status, content)
        return content

    @contextmanager
    def _understood(self, path: str) -> Iterator[None]:
        """Raise SamplerError where reading an answer fails: it is not what the protocol has there."""
        try:
            yield
        except NanodagError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error!s:.200}"
            raise SamplerError(f"{path} of {self.url} answered what no sampler answers ({reason})") from error

    def _raise_for(self, path: str, status: int, content: bytes) -> NoReturn:
        message = f"{path} of {self.url} answered {status}: {_reason(content)}"
        is_none = path in TABLES and 300 <= status < 500 and status not in MAY_PASS
        raise BadRequest(message) if status in REFUSALS or is_none else SamplerError(message)

    @contextmanager
    def _reached(self, path: str) -> Iterator[None]:
        """Raise SamplerLost where asking it fails on the way."""
        try:
            yield
        except LOST as error:
            message = f"the sampler at {self.url} was lost at {path}: {type(error).__name__} {error}"
            message += " (request_timeout_s)" if isinstance(error, aiohttp.SocketTimeoutError) else ""
            raise SamplerLost(message.rstrip()) from error


def _joined(before: Completion, part: Completion) -> Completion:
    """All of a sample, of all before a part and the part."""
    return replace(
        part,
        output_ids=before.output_ids + part.output_ids,
        logprobs=before.logprobs + part.logprobs,
        prompt_ids=before.prompt_ids,
        prompt_logprobs=before.prompt_logprobs,
        top_logprobs=[*before.top_logprobs, *part.top_logprobs],
        prompt_top_logprobs=before.prompt_top_logprobs,
        num_told_tokens=0,
    )


def _give_up(response: aiohttp.ClientResponse) -> None:
    """Have whoever reads its body meet an error: aiohttp leaves readers of a connection that it closes waiting."""
    response.content.set_exception(aiohttp.ClientConnectionError("the connection was closed"))


def _parsed(content: bytes) -> Any:
    """JSON, with NaN and the like where there is any: orjson takes half as long, and refuses that."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return from_json(content)


def _numbers(value: Any) -> list[float]:
    return list(value.values()) if isinstance(value, dict) else [float(value or 0.0)]


def _body_of(requests: Sequence[Request], lora_path: str) -> dict[str, Any]:
    """One prompt stands by itself, several as lists. lora_path: of requests that name none."""
    return_logprobs = [request.return_logprob for request in requests]
    body: dict[str, Any] = {
        "input_ids": [list(request.input_ids) for request in requests],
        "sampling_params": [params_to_wire(request.params) | dict(request.further) for request in requests],
        "return_logprob": return_logprobs,
    }
    if any(request.score_prompt for request in requests):
        body["logprob_start_len"] = [0 if request.score_prompt else -1 for request in requests]
    if any(request.top_logprobs for request in requests):
        body["top_logprobs_num"] = [request.top_logprobs for request in requests]
    if any(request.rid is not None for request in requests):
        body["rid"] = [uuid.uuid4().hex if request.rid is None else request.rid for request in requests]
    lora_path = requests[0].lora_path or lora_path
    routes: dict[str, Any] = {"lora_path": lora_path} if lora_path else {}
    if any(request.return_routed_experts for request in requests):
        routes["return_routed_experts"] = True
    if len(requests) == 1:
        return {name: values[0] for name, values in body.items()} | routes
    # SGLang takes no list of return_logprob where n > 1.
    return body | ({"return_logprob": return_logprobs[0]} if len(set(return_logprobs)) == 1 else {}) | routes


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """Every setting, also those at their default: the defaults of the other side may differ."""
    unset = {name for name in ("sampling_seed", "stop") if getattr(params, name) is None}
    return params.model_dump(mode="json", exclude=unset)


def _raise_failure(completion: Completion) -> None:
    reason = completion.finish_reason
    if reason is None or reason.status_code is None:
        return
    message = f"the sampler failed at {completion.rid}: {reason.message}"
    raise BadRequest(message) if reason.status_code == HTTPStatus.BAD_REQUEST else SamplerError(message)


def _reason(answer: bytes) -> str:
    try:
        content = from_json(answer)
    except ValueError:
        return answer.decode(errors="replace")[:500]
    if isinstance(content, dict):
        error = content.get("error", content.get("message", content))
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return str(content)
