"""Texts by embedded samplers: one inside this process, or several, each a process on a GPU or core of its own.
SGLang takes a minute to start, in which eight GPUs write the answers of a benchmark.

On a CPU a sampler has one thread and is deterministic, so an answer does not depend on how many of them there are, nor
on what is written beside it.
"""

import asyncio
import secrets
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from nanodag.host.machine import visible_gpus
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import Completion, Request
from nanodag.inference.sampler_process import SamplerProcess, ServerProcess
from nanodag.sampler.engine import Engine
from nanodag.worker.devices import gpu_of_replica

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
REPLICA_FLOPS = 2e11  # what starting another sampler costs: some 3 s of a core
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 6 * 3600.0  # of silence; a sampler that dies is noticed at once

OnWritten = Callable[[int, Completion], None]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """max_batch: answers at once, of one sampler. cache_bytes: of its keys and values. replicas: samplers at most."""

    folder: Path
    precision: str
    device: str
    replicas: int
    max_batch: int
    cache_bytes: int


class AnswerWriter(Protocol):
    """What writes answers. context: prompt and answer together, in tokens. num_replicas: samplers."""

    context: int
    num_replicas: int

    def write(self, requests: Sequence[Request], on_written: OnWritten) -> None:
        """Answer requests of one sample each. on_written gets a request's number and its answer, as they are done."""

    def close(self) -> None:
        """End it, and give its memory back."""


def start_sampler(settings: SamplerSettings, *, context: int, flops: float) -> AnswerWriter:
    """Samplers of that context, as many as there are GPUs or cores for and as have something to do. flops: of what is
    to be written. Raises BadRequest for sizes that do not fit, SamplerLost where one does not start."""
    replicas = replicas_for(settings, flops)
    return InProcess(settings, context) if replicas == 1 else Replicas(settings, context, replicas)


def replicas_for(settings: SamplerSettings, flops: float) -> int:
    """How many samplers a benchmark gets: one for each GPU that this process may use, or as the config says on a CPU,
    and none that would cost more to start than it computes."""
    most = settings.replicas
    if settings.device == "cuda":
        most = min(most, len(visible_gpus()))
    return max(1, min(most, int(flops / REPLICA_FLOPS)))


class InProcess:
    """One sampler in this process: nothing is to be started, and torch is loaded."""

    num_replicas = 1

    def __init__(self, settings: SamplerSettings, context: int) -> None:
        self.context = context
        self._is_exact = settings.device == "cpu"
        self._on_one_thread(partial(self._start, settings))

    def _start(self, settings: SamplerSettings) -> None:
        self._engine = Engine(
            settings.folder,
            dtype=DTYPES[settings.precision],
            device=settings.device,
            max_batch=settings.max_batch,
            context_length=self.context,
            cache_bytes=settings.cache_bytes,
            deterministic=self._is_exact,
        )

    def write(self, requests: Sequence[Request], on_written: OnWritten) -> None:
        """As AnswerWriter says."""
        self._on_one_thread(partial(self._write, requests, on_written))

    def _write(self, requests: Sequence[Request], on_written: OnWritten) -> None:
        self._engine.forget_prompts()  # what an earlier call left in the cache must not change how this one rounds

        def written(number: int, index: int, completion: Completion) -> None:
            on_written(number, completion)

        for number, request in enumerate(requests):
            self._engine.submit(request, partial(written, number))
        while self._engine.has_work:
            self._engine.step()

    def _on_one_thread(self, work: Callable[[], T]) -> T:
        """Work as the samplers do that are processes: on a CPU with one thread of torch, else with all of them."""
        threads = torch.get_num_threads()
        if self._is_exact:
            torch.set_num_threads(1)
        try:
            return work()
        finally:
            torch.set_num_threads(threads)

    def close(self) -> None:
        """As AnswerWriter says."""
        on_gpu = self._engine.device.type == "cuda"
        del self._engine
        if on_gpu:
            torch.cuda.empty_cache()


class Replicas:
    """Several samplers, each a process on a GPU or core of its own."""

    def __init__(self, settings: SamplerSettings, context: int, count: int) -> None:
        self.context, self.num_replicas = context, count
        self._max_batch, self._token = settings.max_batch, secrets.token_hex(16)
        self._logs = tempfile.TemporaryDirectory(prefix="nanodag-evaluation-")
        self._servers: list[ServerProcess] = []
        with ThreadPoolExecutor(count) as pool:
            starting = [pool.submit(self._start, settings, number) for number in range(count)]
        try:
            for future in starting:
                future.result()
        except BaseException:
            self.close()
            raise

    def _start(self, settings: SamplerSettings, number: int) -> None:
        server = SamplerProcess.start(
            settings.folder,
            log_path=Path(self._logs.name) / f"sampler-{number}.log",
            dtype=DTYPES[settings.precision],
            device=settings.device,
            gpu=gpu_of_replica(number) if settings.device == "cuda" else "",
            max_batch=settings.max_batch,
            context_length=self.context,
            cache_bytes=settings.cache_bytes,
            deterministic=settings.device == "cpu",
            token=self._token,
            start_timeout_s=START_TIMEOUT_S,
        )
        self._servers.append(server)

    def write(self, requests: Sequence[Request], on_written: OnWritten) -> None:
        """As AnswerWriter says."""
        asyncio.run(self._write(requests, on_written))

    async def _write(self, requests: Sequence[Request], on_written: OnWritten) -> None:
        waiting = deque(enumerate(requests))

        async def work(client: SamplerClient) -> None:
            while waiting:
                number, request = waiting.popleft()
                ((completion,),) = await client.generate([request])
                on_written(number, completion)

        clients = [
            SamplerClient(server.url, token=self._token, request_timeout_s=REQUEST_TIMEOUT_S)
            for server in self._servers
        ]
        try:
            await asyncio.gather(*(work(client) for _ in range(self._max_batch) for client in clients))
        finally:
            for client in clients:
                await client.close()

    def close(self) -> None:
        """As AnswerWriter says."""
        for server in self._servers:
            server.stop()
        self._logs.cleanup()
