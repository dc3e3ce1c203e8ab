"""The embedded sampler's endpoints about weights: from a folder, by broadcast, by shared memory, and what it holds.

What comes in buckets is a session, as in SGLang: begin, any number of updates, end. Received tensors become a second
set of weights beside generation, and replace the first at the end, between two tokens. Until then, and when anything
goes wrong, every token is drawn with the old weights. So all of a model's tensors must come in one session; SGLang
takes any part of them.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from nanodag.errors import BadRequest, SamplerError
from nanodag.inference import weight_bodies as bodies
from nanodag.inference.access_checks import body_of, routes
from nanodag.inference.protocol import EmptyBody
from nanodag.sampler.adapters import AdapterBuilder
from nanodag.sampler.engine import Engine
from nanodag.sampler.engine_loop import Traffic
from nanodag.sampler.fingerprints import fingerprints_of, overall
from nanodag.sampler.shared_tensors import opened
from nanodag.sampler.transformers_sampler import ClassWeightsBuilder
from nanodag.sampler.weight_group import WeightGroup, broadcast_of, join_group
from nanodag.sampler.weights import NamedTensors, WeightsBuilder, read_tensors

RANK_NAMES = ("tp_rank", "tp_size", "dp_rank", "dp_size", "pp_rank", "pp_size", "rank", "size")

Made = tuple[NamedTensors, list[int]]
"""Weights, and the sums of their tensors."""


@dataclass
class _Session:
    """Between begin and end. failure: of the first bucket that was not received or is of no use. made: of all that
    came, once that is a whole model. fingerprints: of what came, made beside whatever else is done."""

    builder: WeightsBuilder | ClassWeightsBuilder | AdapterBuilder
    fingerprints: list["asyncio.Future[dict[str, str]]"] = field(default_factory=list)
    version: str | None = None
    failure: str = ""
    made: Made | None = None


@dataclass(frozen=True)
class _Received:
    """Fingerprints of the weights in memory, when they came in buckets. sums: of the engine's own tensors, when they
    were made."""

    fingerprints: list["asyncio.Future[dict[str, str]]"]
    sums: list[int]


class WeightEndpoints:
    """The state behind them. One change at a time; requests in flight are waited for, unless they are paused."""

    def __init__(self, engine: Engine, traffic: Traffic) -> None:
        self.engine = engine
        self.traffic = traffic
        self._groups: dict[str, WeightGroup] = {}
        self._session: _Session | None = None
        self._received: _Received | None = None
        self._one_at_a_time = asyncio.Lock()

    def routes(self) -> list[Route]:
        return routes("POST", (
            self.update_weights_from_disk, self.weights_checker, self.init_weights_update_group,
            self.destroy_weights_update_group, self.begin_weight_update, self.update_weights_from_distributed,
            self.update_weights_from_tensor, self.end_weight_update,
        ))  # fmt: skip

    async def update_weights_from_disk(self, http: HttpRequest) -> Response:
        """Wait for requests in flight (unless paused), then change the weights. A bad path keeps the old ones."""
        try:
            body = await body_of(http, bodies.UpdateWeightsBody)
            path = Path(body.model_path)
            self.engine.check_room_for_weights()
            weights = await asyncio.to_thread(self.engine.load, path)
        except BadRequest as error:
            return _answer(False, str(error))
        if body.abort_all_requests:
            await self._abort_all("update_weights_from_disk")
        await self._change(weights, path, body.weight_version, None)
        return _answer(True, f"Succeeded to update model weights.{_now(body.weight_version)}")

    async def weights_checker(self, http: HttpRequest) -> Response:
        """Fingerprints of the weights as they came, once it is certain that they are what is in memory.

        What is in memory has another layout. So a checkpoint is read again, and must still be there, and adapters are
        merged again; what else came by broadcast was fingerprinted as it came, and its layout in memory summed up when
        it was made.
        """
        await body_of(http, bodies.WeightsCheckerBody)
        adapters, received = self.engine.model.weights.adapters, self._received  # others may come meanwhile
        if received is not None and adapters is None:
            if await self.traffic.in_loop(self.engine.model.weights.sums) != received.sums:
                raise SamplerError("the weights in memory are not those that were broadcast")
            # Shielded: who asks next needs them too.
            of_buckets = await asyncio.shield(asyncio.gather(*received.fingerprints))
            fingerprints = {name: fingerprint for bucket in of_buckets for name, fingerprint in bucket.items()}
        else:
            fingerprints = await self._check_made(adapters, self.engine.checkpoint.path)
        place = {name: int(name.endswith("size")) for name in RANK_NAMES}
        rank = {
            "checksums": fingerprints,
            "per_gpu_checksum": overall(fingerprints),
            "parallelism_info": [{"role": "target", **place}],
        }
        return JSONResponse({"success": True, "message": "Success.", "ranks": [rank]})

    async def init_weights_update_group(self, http: HttpRequest) -> Response:
        """Join a group whose rank 0 waits at the address. Answers when all of its members are there."""
        body = await body_of(http, bodies.InitGroupBody)
        if body.group_name in self._groups:
            return _answer(False, f"there is a group {body.group_name!r} already: destroy it, or choose another name")
        if body.backend == "nccl" and self.engine.device.type != "cuda":
            return _answer(False, f"backend 'nccl' needs a GPU; this sampler is on {self.engine.device}: use gloo")
        try:
            self._groups[body.group_name] = await asyncio.to_thread(join_group, body)
        except (RuntimeError, OSError) as error:
            return _answer(False, f"Failed to initialize custom process group: {error}.")
        return _answer(True, "Succeeded to initialize custom process group.")

    async def destroy_weights_update_group(self, http: HttpRequest) -> Response:
        body = await body_of(http, bodies.DestroyGroupBody)
        group = self._groups.pop(body.group_name, None)
        if group is None:
            return _answer(False, "The group to be destroyed does not exist.")
        group.close()
        return _answer(True, "Succeeded to destroy custom process group.")

    async def begin_weight_update(self, http: HttpRequest) -> Response:
        body = await body_of(http, bodies.BeginUpdateBody)
        if self._session is not None:
            return _answer(False, "a weight-update session is already open; call end_weight_update() first")
        try:
            self.engine.check_room_for_weights()
        except BadRequest as error:
            return _answer(False, str(error))
        source, scale = "what was broadcast", body.lora_scale
        alone = None if scale is None else AdapterBuilder(self.engine, scale, source)
        self._session = _Session(alone or self.engine.builder(source))
        return _answer(True, "Success")

    async def update_weights_from_distributed(self, http: HttpRequest) -> Response:
        """Receive one broadcast of rank 0: all tensors in one piece (flattened_bucket), or one after the other."""
        body = await body_of(http, bodies.ReceiveWeightsBody)
        group = self._groups.get(body.group_name)
        if self._session is not None and group is None:
            return _answer(False, f"there is no group {body.group_name!r}: call init_weights_update_group first")
        receive = partial(broadcast_of, cast(WeightGroup, group), body)  # there is one where there is a session
        return await self._receive("update_weights_from_distributed", body, receive)

    async def update_weights_from_tensor(self, http: HttpRequest) -> Response:
        """Take one bucket out of memory that the sender shares. It is copied when this is answered."""
        body = await body_of(http, bodies.ReceiveTensorsBody)
        (handle,) = body.handles(1)
        return await self._receive("update_weights_from_tensor", body, lambda: opened(handle, self.engine.device))

    async def _receive(
        self, endpoint: str, body: bodies.BucketBody, receive: Callable[[], dict[str, Tensor]]
    ) -> Response:
        """One bucket of a session. What is wrong with its tensors is told at the end: who sends goes on to there."""
        session = self._session
        if session is None:
            return _answer(False, f"{endpoint} must run between begin_weight_update() and end_weight_update()")
        if body.abort_all_requests:
            await self._abort_all(endpoint)
        async with self._one_at_a_time:
            try:
                tensors = await asyncio.to_thread(receive)
            except RuntimeError as error:
                session.failure = session.failure or f"not all new ones were received: {error}"
                return _answer(False, f"Failed to receive weights: {error}")
            await self._add(session, tensors, is_last=body.weight_version is not None)
        session.version = body.weight_version if body.weight_version is not None else session.version
        return _answer(True, f"Succeeded to update parameter online.{_now(body.weight_version)}")

    async def _add(self, session: _Session, tensors: dict[str, Tensor], *, is_last: bool) -> None:
        """Build weights of what came. With the last bucket they are whole, and the end has only to take them."""
        session.fingerprints.append(asyncio.ensure_future(asyncio.to_thread(fingerprints_of, tensors.items())))
        session.made = None
        try:
            await asyncio.to_thread(session.builder.add, tensors)
        except BadRequest as error:
            session.failure = session.failure or str(error)
        if is_last and not session.failure:
            with suppress(BadRequest):  # told at the end, if nothing more comes
                session.made = await asyncio.to_thread(_made_of, session.builder)

    async def end_weight_update(self, http: HttpRequest) -> Response:
        """Make what was received the weights, wholly or not at all."""
        await body_of(http, EmptyBody)
        async with self._one_at_a_time:
            session, self._session = self._session, None
            if session is None:
                return _answer(False, "no weight-update session is open; call begin_weight_update() first")
            if session.failure:
                return _answer(False, f"The old weights are kept: {session.failure}")
            if not session.fingerprints:
                return _answer(True, "Success")
            if session.version is None and isinstance(session.builder, AdapterBuilder):  # some would pass for all
                return _answer(False, "The old weights are kept: the last bucket of adapters has not come")
            try:
                made = session.made
                weights, sums = await asyncio.to_thread(_made_of, session.builder) if made is None else made
            except BadRequest as error:
                return _answer(False, f"The old weights are kept: {error}")
            received = _Received(session.fingerprints, sums)
            await self._change(weights, self.engine.checkpoint.path, session.version, received)
        return _answer(True, "Success")

    async def _change(self, weights: NamedTensors, path: Path, version: str | None, received: _Received | None) -> None:
        async with self.traffic.paused():
            await self.traffic.in_loop(lambda: self.engine.update_weights(weights, path, version))
            self._received = received

    async def _check_made(self, adapters: AdapterBuilder | None, path: Path) -> dict[str, str]:
        weights = await asyncio.to_thread(adapters.whole if adapters else lambda: self.engine.load(path))
        differing = await self.traffic.in_loop(lambda: self.engine.model.weights.differing(weights))
        if differing:
            raise SamplerError(f"the weights in memory are not those of {path}: {', '.join(differing)} differ")
        tensors = adapters.merged if adapters else lambda: read_tensors(path).items()
        return await asyncio.to_thread(lambda: fingerprints_of(tensors()))

    async def _abort_all(self, endpoint: str) -> None:
        await self.traffic.in_loop(lambda: self.engine.abort(lambda running: True, f"aborted by {endpoint}"))


def _made_of(builder: WeightsBuilder | ClassWeightsBuilder | AdapterBuilder) -> Made:
    weights = builder.whole()
    return weights, weights.sums()


def _now(version: str | None) -> str:
    return "" if version is None else f" Weight version updated to {version}."


def _answer(is_done: bool, message: str) -> Response:
    return JSONResponse({"success": is_done, "message": message}, status_code=200 if is_done else 400)
