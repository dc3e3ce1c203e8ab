"""Texts by samplers: an embedded one inside this process, or several of any engine, each a process on a GPU or core
of its own, which are handed requests one by one as they get done with others.

On a CPU an embedded sampler has one thread and is deterministic: no answer depends on how many there are, or on others.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from nanodag.config.derive_sampler import REPLICA_FLOPS, SGLANG_STATIC, SHARE_OF_HOST
from nanodag.config.kinds.evaluation import EvalSamplerConfig
from nanodag.engines.fleet import Fleet
from nanodag.engines.start import ServerProcess, cache_tokens, start_engine
from nanodag.host.folders import Scratch
from nanodag.host.machine import visible_gpus
from nanodag.host.threads import all_of
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_install import Device
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.number_formats import DTYPES
from nanodag.inference.protocol import Completion, Request
from nanodag.model.architecture import check_sglang, read_checkpoint
from nanodag.sampler.engine import Engine
from nanodag.worker.job import stop_requested

START_TIMEOUT_S = {"embedded": 300.0, "sglang": 900.0, "vllm": 900.0}
SGLANG_CONTEXT = 8192  # as far as the model has so many positions: no later benchmark needs another start
REQUEST_TIMEOUT_S = 6 * 3600.0  # of silence; a sampler that dies is noticed at once

OnWritten = Callable[[int, Completion], None]


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """Settings of the samplers of one model. config: derived. threads: that this stage may use."""

    folder: Path
    precision: str
    device: Device
    threads: int
    config: EvalSamplerConfig

    @property
    def is_exact(self) -> bool:
        """True when an answer is the same whatever is written beside it."""
        return self.device == "cpu" and self.config.engine == "embedded"

    def engine(self, context: int, replicas: int, token: str = "") -> EngineSettings:
        """Description of each of so many replicas."""
        config, dtype = self.config, DTYPES[self.precision]
        assert config.engine != "auto"  # derived
        if config.engine == "sglang":
            check_sglang(self.folder, context, "sampler.engine")
        return EngineSettings(
            engine=config.engine,
            model=self.folder,
            device=self.device,
            dtype=dtype,
            max_batch=int(config.max_batch),
            context_length=context,
            threads=max(1, self.threads // replicas),
            token=token,
            start_timeout_s=START_TIMEOUT_S[config.engine],
            cache_bytes=int(config.cache_bytes),
            deterministic=self.is_exact,
            python=config.python,
            tensor_parallel=config.tensor_parallel,
            cache_tokens=cache_tokens(self.folder, cache_bytes=int(config.cache_bytes), dtype=dtype, context=context),
            # Of what is free then, on a GPU: all of it, as the cache is bounded, but for SGLang's graphs.
            memory_fraction=SGLANG_STATIC if self.device == "cuda" else SHARE_OF_HOST,
            # SGLang finds stop strings in the text.
            options={**({"skip-tokenizer-init": False} if config.engine == "sglang" else {}), **config.options},
        )


def start_sampler(settings: SamplerSettings, *, context: int, flops: float) -> "InProcess | Replicas":
    """Samplers with room for a context, as many as there are GPUs or cores for and as have something to do. flops: of
    what is to be written.

    Raises BadRequest for sizes that do not fit, SamplerLost where one does not start, MissingTool for a missing SGLang.
    """
    replicas = replicas_for(settings, flops)
    if settings.config.engine != "embedded":  # its start takes a minute, and its cache is shared out by the token
        positions = read_checkpoint(settings.folder).architecture.max_positions
        return Replicas(settings, max(context, min(SGLANG_CONTEXT, positions)), replicas)
    return InProcess(settings, context) if replicas == 1 else Replicas(settings, context, replicas)


def replicas_for(settings: SamplerSettings, flops: float) -> int:
    """Number of samplers of a benchmark: one for each GPU, or tensor_parallel of them, that this process may use; on a
    CPU as the config says; and of embedded ones none that would cost more to start than it computes."""
    most = int(settings.config.replicas)
    if settings.device == "cuda":
        most = min(most, len(visible_gpus()) // settings.config.tensor_parallel)
    if settings.config.engine == "embedded":
        most = min(most, int(flops / REPLICA_FLOPS))
    return max(1, most)


class InProcess:
    """One sampler in this process: nothing is started, and torch is loaded. context: tokens of prompt and answer."""

    num_replicas = 1

    def __init__(self, settings: SamplerSettings, context: int) -> None:
        self.context = context
        self._is_exact = settings.is_exact
        with self._threads_of_a_process():
            self._engine = Engine(settings.engine(context, 1))

    def write(self, requests: Sequence[Request], on_written: OnWritten) -> None:
        """Answer requests of one sample each. on_written gets a request's number and its answer, as they are done."""

        def written(number: int, index: int, completion: Completion) -> None:
            on_written(number, completion)

        with self._threads_of_a_process():
            self._engine.forget_prompts()  # what an earlier call left in the cache must not change how this one rounds
            for number, request in enumerate(requests):
                self._engine.submit(request, partial(written, number))
            while self._engine.has_work:
                self._engine.step()

    @contextmanager
    def _threads_of_a_process(self) -> Iterator[None]:
        """Work as the samplers do that are processes: on a CPU with one thread of torch, else with all of them."""
        threads = torch.get_num_threads()
        if self._is_exact:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def close(self) -> None:
        """End it, and give its memory back."""
        on_gpu = self._engine.device.type == "cuda"
        del self._engine
        if on_gpu:
            torch.cuda.empty_cache()


class Replicas:
    """Samplers that are processes. One that dies is started again, and what it was asked is asked again."""

    def __init__(self, settings: SamplerSettings, context: int, count: int) -> None:
        self.context, self.num_replicas = context, count
        self._max_batch = int(settings.config.max_batch)
        self._logs = Scratch("evaluation")
        self.fleet = fleet_of(settings, context, count, logs=self._logs.path)
        self._runner = asyncio.Runner()
        try:
            self._runner.run(self.fleet.start(count))
        except BaseException:
            self.close()
            raise

    def write(self, requests: Sequence[Request], on_written: OnWritten) -> None:
        """As of InProcess."""
        self._runner.run(self._write(requests, on_written))

    async def _write(self, requests: Sequence[Request], on_written: OnWritten) -> None:
        waiting = deque(enumerate(requests))

        async def work() -> None:
            while waiting:
                number, request = waiting.popleft()
                ((completion,),) = await self.fleet.generate([request])
                on_written(number, completion)

        await all_of(work() for _ in range(self._max_batch * self.num_replicas))

    def close(self) -> None:
        """End them."""
        self._runner.run(self.fleet.end())
        self._runner.close()
        self._logs.cleanup()


def fleet_of(settings: SamplerSettings, context: int, count: int, *, logs: Path, name: str = "Sampler") -> Fleet:
    """So many samplers of a model, not started yet. logs: their folder."""
    token = secrets.token_hex(16)
    engine = settings.engine(context, count, token)

    def launch(number: int, folder: Path, version: str) -> ServerProcess:
        return start_engine(engine.of_replica(number, folder, version), log_path=logs / f"sampler-{number}.log")

    def connect(url: str) -> SamplerClient:
        vocab_size = read_checkpoint(settings.folder).architecture.vocab_size
        return SamplerClient(
            url, token=token, request_timeout_s=REQUEST_TIMEOUT_S, vocab_size=vocab_size, context_length=context
        )

    return Fleet(
        model=settings.folder, version="0", launch=launch, connect=connect, name=name, is_stopping=stop_requested
    )
