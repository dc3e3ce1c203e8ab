"""Samplers and a trainer's rank 0 in one event loop, as far as weights go, which can be killed at every step.

The samplers speak the protocol over HTTP, so that clients are the real ones; their weights are one word. They refuse
what CUDA refuses: NCCL of two versions, two ranks on one GPU, a group that lacks a member, a handle of another GPU. A
step is a request that reached a sampler ("asked"), was executed but not answered ("done") or was answered ("answered"),
and the beginning and end of what the trainer is asked for.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from nanodag.engines.fleet import Fleet
from nanodag.inference.client import SamplerClient
from nanodag.inference.nccl import fault

NUM_BUCKETS = 2
PATIENCE_S = 20.0
Step = tuple[int, str, str]
"""Of which sampler, what was asked for, and how far it had come."""


class FakeServer:
    """What `Server` is, in this process."""

    pid = 0

    def __init__(self) -> None:
        self.is_alive = True
        self.url = ""
        self.answers: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {}

    async def start(self, port: int = 0) -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True).start()
        self.url = "http://127.0.0.1:{1}".format(*self._runner.addresses[0][:2])

    def kill(self) -> None:
        """At once, for whoever is connected. What was just accepted is a connection two turns of the loop later, and an
        asyncio server that is closed before would leave its socket open for ever."""
        self.is_alive = False
        loop = asyncio.get_running_loop()
        for site in self._runner.sites:
            for listener in site._server.sockets:
                loop.remove_reader(listener.fileno())
        self._abort()
        loop.call_soon(self._close, 2)

    def _abort(self) -> None:
        for connection in self._runner.server.connections if self._runner.server is not None else ():
            connection.force_close()
            if connection.transport is not None:
                connection.transport.abort()

    def _close(self, turns: int) -> None:
        for site in self._runner.sites:
            site._server.close()
        self._abort()
        if turns:
            asyncio.get_running_loop().call_soon(self._close, turns - 1)

    stop = kill

    def tail(self) -> str:
        return "no log"

    async def _answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read() or b"{}")
        name = request.path.strip("/").partition("/")[0]
        return await self.execute(name, request, body)

    async def execute(self, name: str, request: web.Request, body: dict[str, Any]) -> web.Response:
        raise NotImplementedError

    async def weights_checker(self, body: dict[str, Any]) -> Any:
        return {"ranks": [{"checksums": {"w": self.weights}}]}


class FakeSampler(FakeServer):
    """One sampler."""

    def __init__(self, world: "World", number: int, weights: str, version: str) -> None:
        super().__init__()
        self.world, self.number = world, number
        self.weights, self.version = weights, version
        self.received: list[str] | None = None
        self.released: set[str] = set()
        self.gpus = world.gpus[number]
        self.nccl = world.nccl

    async def execute(self, name: str, request: web.Request, body: dict[str, Any]) -> web.Response:
        if name in ("health", "health_generate"):
            assert name == "health" or not self.released, "SGLang would generate"
            return web.json_response({})
        self.world.at(self.number, name, "asked")
        try:
            found = await getattr(self, name)(body)
        except ValueError as error:
            return web.json_response({"message": str(error)}, status=400)
        self.world.at(self.number, name, "done")
        return web.json_response(found)

    async def model_info(self, body: dict[str, Any]) -> Any:
        return {"weight_version": self.version}

    async def server_info(self, body: dict[str, Any]) -> Any:
        return {"memory": {"bytes": 2 - len(self.released), "peak_bytes": 2}}

    async def release_memory_occupation(self, body: dict[str, Any]) -> Any:
        assert not self.released.intersection(body["tags"])
        self.released.update(body["tags"])
        self.weights = "lost" if "weights" in body["tags"] else self.weights
        return {}

    async def resume_memory_occupation(self, body: dict[str, Any]) -> Any:
        """As SGLang, which ends at tags that were not released."""
        for tag in body["tags"]:
            self.released.remove(tag)
        return {}

    async def update_weights_from_disk(self, body: dict[str, Any]) -> Any:
        assert "weights" not in self.released
        if self.received is not None:
            raise ValueError("a session is open")
        if (weights := read_weights(Path(body["model_path"]))) == "other shape":
            raise ValueError("of another shape")
        self.weights = weights
        self.version = body["weight_version"]
        return {}

    async def init_weights_update_group(self, body: dict[str, Any]) -> Any:
        self.rank_offset = body["rank_offset"]
        if body["backend"] == "nccl":  # whose members meet at their first collective
            if wrong := fault(self.world.trainer.nccl, self.nccl):
                raise ValueError(wrong)
            self.world.trainer.joined.append(self)
        else:
            await self.world.trainer.meet(self, body["group_name"])
        return {}

    async def begin_weight_update(self, body: dict[str, Any]) -> Any:
        if self.received is not None:
            raise ValueError("a session is open already")
        self.received = []
        return {}

    async def update_weights_from_distributed(self, body: dict[str, Any]) -> Any:
        assert self.received is not None
        self.received.append(await self.world.trainer.meet(self, body["group_name"]))
        self.new_version = body.get("weight_version")
        return {}

    async def update_weights_from_tensor(self, body: dict[str, Any]) -> Any:
        assert self.received is not None
        handles = [handle.split() for handle in body["serialized_named_tensors"]]
        if [gpu for gpu, _ in handles] != self.gpus:
            raise ValueError(f"handles of {handles}, and its ranks are on {self.gpus}")
        self.received.append(handles[0][1])
        self.new_version = body.get("weight_version")
        return {}

    async def end_weight_update(self, body: dict[str, Any]) -> Any:
        received, self.received = self.received, None
        if received is None or len(received) < NUM_BUCKETS:
            raise ValueError("not all of them were received")
        self.weights, self.version = received[0], self.new_version
        return {}

    async def pause_generation(self, body: dict[str, Any]) -> Any:
        return {}

    continue_generation = destroy_weights_update_group = pause_generation

    async def generate(self, body: dict[str, Any]) -> Any:
        if self.released:
            raise ValueError(f"{' and '.join(sorted(self.released))} released")
        await self.world.may_answer.wait()
        meta = {"id": "x", "weight_version": self.version, "finish_reason": {"type": "length"}}
        token = body["input_ids"][-1]
        return {"output_ids": [token], "meta_info": {**meta, "output_token_logprobs": [[-1.0, token, None]]}}


class FakeTrainer:
    """Rank 0: one thing at a time, as a `RankLink` asks for it."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.weights = self.kept = "0"
        self.asked: list[str] = []
        self.gpus, self.nccl = world.trainer_gpus, world.nccl
        self.joined: list[FakeSampler] = []  # to a group of NCCL
        self._one_at_a_time = asyncio.Lock()
        self._name, self._backend = "", "gloo"
        self._group: list[FakeSampler] = []
        self._waiting: dict[FakeSampler, asyncio.Future[str]] = {}

    async def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        return await asyncio.shield(asyncio.ensure_future(self._execute(do, arguments)))

    async def _execute(self, do: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        async with self._one_at_a_time:
            self.asked.append(do)
            for number in range(len(self.world.servers)):
                self.world.at(number, do, "begun")
            found = await getattr(self, do)(**arguments)
            for number in range(len(self.world.servers)):
                self.world.at(number, do, "ended")
            return found if isinstance(found, list) else [found]

    async def meet(self, sampler: FakeSampler, group: str) -> str:
        """Wait for the others; the weights that rank 0 gives. Raises ValueError when it has left."""
        if group != self._name:
            raise ValueError("no such group")
        self._waiting[sampler] = asyncio.get_running_loop().create_future()
        return await self._waiting[sampler]

    async def layout(self) -> dict[str, Any]:
        return {"buckets": [{"names": [f"w{n}"], "dtypes": ["float32"], "shapes": [[1]]} for n in range(NUM_BUCKETS)]}

    async def open_group(self, name: str, size: int, address: str, backend: str) -> dict[str, Any]:
        self._name, self._group, self._backend, self.joined = name, list(self.world.servers), backend, []
        assert size == 1 + sum(len(member.gpus) for member in self._group)
        return {"port": 1}

    async def join_group(self) -> dict[str, Any]:
        return {"failure": "" if self._backend == "nccl" else await self._all_met()}

    async def leave_group(self) -> dict[str, Any]:
        self._name = ""
        return {}

    async def broadcast(self, which: str, fingerprint: bool) -> dict[str, Any]:
        self.kept = self.weights
        failure = "" if self._name else "there is no group"
        if self._backend == "nccl" and self._name:
            assert set(self.joined) == set(self._group), "rank 0 would wait for ever for who is not there"
            gpus = [self.gpus[0], *(gpu for member in self._group for gpu in member.gpus)]
            failure = failure if len(set(gpus)) == len(gpus) else "Duplicate GPU detected"
        for _ in range(NUM_BUCKETS):
            failure = await self._all_met(failure)
        return {"failure": failure, "fingerprints": {"w": self.kept} if fingerprint else {}}

    async def lend(self, what: str) -> dict[str, Any]:
        return {"bytes": 1}

    async def take_back(self) -> dict[str, Any]:
        return {}

    async def share(self, number: int, counts: list[int], fingerprint: bool) -> list[dict[str, Any]]:
        self.kept = self.weights
        found = {"w": self.kept} if fingerprint else {}
        return [
            {"failure": "", "handles": [f"{gpu} {self.kept}"] * count, "fingerprints": found}
            for gpu, count in zip(self.gpus, counts, strict=False)
        ]

    async def _all_met(self, failure: str = "") -> str:
        """Wait for all members and give them the weights; why that cannot be, else ""."""
        while len(self._waiting) < len(self._group) and not failure:
            await asyncio.sleep(0.0005)
            if not all(member.is_alive for member in self._group):
                failure = "a member is gone"
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(ValueError(failure)) if failure else future.set_result(self.kept)
        self._name = "" if failure else self._name
        return failure

    async def export(self, folder: str, fingerprint: bool = False, kept: bool = False) -> dict[str, Any]:
        await asyncio.sleep(0.001)
        write_weights(Path(folder), self.kept if kept else self.weights)
        return {"fingerprints": {"w": self.weights} if fingerprint else {}}


class World:
    """Samplers, two if not said otherwise, and what happens to them. kill_at: the number of the step at which the
    sampler that it belongs to is killed; None for none. steps: those that came by. gpus: of each sampler's ranks.
    trainer_gpus: of the trainer's."""

    def __init__(
        self,
        folder: Path,
        *,
        kill_at: int | None = None,
        size: int = 2,
        gpus: Sequence[Sequence[str]] = (),
        trainer_gpus: Sequence[str] = ("cpu",),
        **options: Any,
    ) -> None:
        self.gpus = [list(own) for own in gpus] or [["cpu"]] * size
        self.trainer_gpus, self.nccl = list(trainer_gpus), "2.30.7"
        self.folder, self.kill_at, self.options = folder, kill_at, options
        self.size = len(self.gpus)
        self.steps: list[Step] = []
        self.killed: Step | None = None
        self.may_answer = asyncio.Event()
        self.trainer = FakeTrainer(self)
        self.servers: list[FakeSampler] = []
        self.started: list[str] = []  # versions, of each server
        self.faults: list[Exception] = []  # of the next starts
        self.held: threading.Event | None = None  # what a start waits for
        self._replaced: list[FakeSampler] = []

    async def __aenter__(self) -> "World":
        write_weights(self.folder / "model", "0")
        self._loop = asyncio.get_running_loop()
        for number in range(self.size):
            self.started.append("0")
            await self._start(number, self.folder / "model", 0)
        self.samplers = Fleet(
            self.servers,
            model=self.folder / "model",
            version=0,
            launch=self._launch,
            connect=self._connect,
            health_every_s=0.002,
            **self.options,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        self.samplers.close()
        await self.samplers.disconnect()
        servers = [*self._replaced, *self.servers]
        for server in servers:
            server.kill()
        await asyncio.sleep(0.01)
        for server in servers:
            await server._runner.cleanup()
        await asyncio.sleep(0)

    def at(self, number: int, name: str, how: str) -> None:
        """A step; the sampler is killed if it is this one's turn."""
        self.steps.append((number, name, how))
        if len(self.steps) - 1 == self.kill_at:
            self.killed = self.steps[-1]
            self.servers[number].kill()

    async def _start(self, number: int, folder: Path, version: int) -> FakeSampler:
        server = FakeSampler(self, number, read_weights(folder), str(version))
        await server.start()
        self._replaced += self.servers[number : number + 1]  # one may accept a connection after it was killed
        self.servers[number : number + 1] = [server]
        return server

    def _launch(self, number: int, folder: Path, version: int) -> FakeSampler:
        if self.faults:
            raise self.faults.pop()
        self.started.append(str(version))
        if self.held is not None:
            self.held.wait(PATIENCE_S)
        return asyncio.run_coroutine_threadsafe(self._start(number, folder, version), self._loop).result(PATIENCE_S)

    def _connect(self, url: str) -> SamplerClient:
        world, (number,) = self, [server.number for server in self.servers if server.url == url]

        class Client(SamplerClient):
            async def _call(self, method: str, path: str, body: Any = None) -> bytes:
                found = await super()._call(method, path, body)
                world.at(number, path.strip("/"), "answered")
                return found

        return Client(url, num_ranks=len(self.gpus[number]))


def write_weights(folder: Path, weights: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_text(weights)


def read_weights(folder: Path) -> str:
    return (folder / "weights").read_text()
