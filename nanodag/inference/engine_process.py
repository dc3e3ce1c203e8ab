"""Starts the processes of an engine, whichever it is, each on GPUs of its own as far as there are so many."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nanodag.host.machine import gpu_of_replica, visible_gpus
from nanodag.inference.sampler_process import Elsewhere, SamplerProcess, ServerProcess
from nanodag.inference.sglang_install import Device, find_python
from nanodag.inference.sglang_options import Option
from nanodag.inference.sglang_process import SGLangProcess


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What all processes of an engine are started with.

    dtype: `float32`, `bfloat16` or `auto`. max_batch: samples that one process decodes at once. context_length: prompt
    and answer, in tokens; None for all of the model's positions, which SGLang does not take. threads: of one. seed: of
    draws that have none of their own. token: that requests must bear. start_timeout_s: without a sign of progress.

    Of the embedded engine: cache_bytes, of one's keys and values; deterministic; stream_every_s, between events.
    Of SGLang: python, its interpreter, as `sampler.python`; tensor_parallel; cache_tokens, the most that one's cache
    holds; memory_fraction, of what is free when it starts; options, others by name.
    """

    engine: Literal["embedded", "sglang"]
    device: Device
    dtype: str
    max_batch: int
    context_length: int | None
    threads: int = 1
    seed: int = 0
    token: str = ""
    start_timeout_s: float = 120.0
    cache_bytes: int | None = None
    deterministic: bool = False
    stream_every_s: float = 0.0
    python: str = "auto"
    tensor_parallel: int = 1
    cache_tokens: int | None = None
    memory_fraction: float = 0.5
    options: Mapping[str, Option] = field(default_factory=dict)


def start_engine(
    settings: EngineSettings,
    number: int,
    model: Path,
    *,
    log_path: Path,
    version: str | int = "default",
    gpus: str = "",
    elsewhere: Elsewhere | None = None,
) -> ServerProcess:
    """Start process `number` with the weights in a folder, and wait until it answers. version: of these weights. gpus:
    those that it sees, as CUDA_VISIBLE_DEVICES names them; "" for those that fall to its number. elsewhere: on that
    machine.

    Raises SamplerLost where it does not start, MissingTool where SGLang is not installed.
    """
    if settings.engine == "sglang":
        return _start_sglang(settings, number, model, log_path, version, gpus, elsewhere)
    return SamplerProcess.start(
        model,
        log_path=log_path,
        dtype=settings.dtype,
        device=settings.device,
        gpu=gpu_of_replica(number) if settings.device == "cuda" and not gpus else gpus,
        max_batch=settings.max_batch,
        context_length=settings.context_length,
        cache_bytes=settings.cache_bytes,
        deterministic=settings.deterministic,
        threads=1 if settings.deterministic else settings.threads,
        seed=settings.seed,
        weight_version=version,
        stream_every_s=settings.stream_every_s,
        token=settings.token,
        start_timeout_s=settings.start_timeout_s,
        elsewhere=elsewhere,
    )


def _start_sglang(
    settings: EngineSettings,
    number: int,
    model: Path,
    log_path: Path,
    version: str | int,
    gpus: str,
    elsewhere: Elsewhere | None,
) -> ServerProcess:
    assert settings.context_length is not None, "SGLang is told its context"
    each = settings.tensor_parallel
    is_placed = settings.device == "cpu" or bool(gpus)  # first_gpu is a NUMA node on a CPU
    return SGLangProcess.start(
        find_python(settings.python, settings.device),
        model,
        log_path=log_path,
        device=settings.device,
        dtype=settings.dtype,
        max_batch=settings.max_batch,
        context_length=settings.context_length,
        weight_version=version,
        memory_fraction=settings.memory_fraction,
        tensor_parallel=each,
        cache_tokens=settings.cache_tokens,
        first_gpu=0 if is_placed else number * each % len(visible_gpus()),
        gpus=gpus,
        threads=settings.threads,
        seed=settings.seed + number,  # it draws from one sequence
        options=settings.options,
        token=settings.token,
        start_timeout_s=settings.start_timeout_s,
        elsewhere=elsewhere,
    )
