"""What samplers hold and how many samples they decode at once: of RL, whichever engine, and of evaluation."""

import math
from dataclasses import dataclass

from nanodag.config.derive_sampler import SGLANG_STATIC
from nanodag.config.footprint import CUDA_BYTES, embedded_sampler, sampler_weights
from nanodag.config.model_size import ModelSize
from nanodag.host.machine import Machine
from nanodag.inference.cache_size import slot_tokens
from nanodag.inference.number_formats import width_of
from nanodag.plan import processes
from nanodag.plan.stage_plan import Process


@dataclass(frozen=True, kw_only=True)
class PlannedSamplers:
    """at_once: samples that all of them decode together. needed_bytes: of cache, for one sample of the context; room:
    what one sampler has for it. process: one of them; None where the model is not known."""

    at_once: int
    needed_bytes: int
    room: int
    process: Process


def embedded_samplers(
    model: ModelSize,
    *,
    precision: str,
    device: str,
    replicas: int,
    max_batch: int,
    context: int,
    cache_bytes: int,
    used: float,
    takes_weights: bool = True,
) -> PlannedSamplers:
    """max_batch: of all replicas together. cache_bytes: of one. used: tokens of a slot that samples fill as a rule: on
    a CPU, pages of the cache that nothing was written to are never taken. takes_weights: while it runs, beside those it
    has."""
    width = width_of(precision)
    tokens = slot_tokens(context)
    needed = tokens * model.token_bytes(width)
    slots = min(-(-max_batch // replicas), cache_bytes // needed)
    held = embedded_sampler(
        model.shape,
        model.vocabulary,
        model.parameters,
        precision=precision,
        slots=slots,
        context=tokens,
        takes_weights=takes_weights,
    )
    held["cache"] = slots * needed
    if device == "cuda":
        host = {"process": processes.CUDA}
        process = Process(name="sampler", count=replicas, device={**held, "cuda": CUDA_BYTES}, host=host, gpus=1)
    else:
        filled = slots * min(needed, slot_tokens(math.ceil(used)) * model.token_bytes(width))
        host = {**held, "cache": filled, "process": processes.SAMPLER}
        process = Process(name="sampler", count=replicas, host=host, reserve=slots * needed - filled)
    return PlannedSamplers(at_once=slots * replicas, needed_bytes=needed, room=cache_bytes, process=process)


def sglang_samplers(
    model: ModelSize,
    machine: Machine,
    *,
    precision: str,
    device: str,
    replicas: int,
    tensor_parallel: int,
    max_batch: int,
    context: int,
    memory_fraction: float,
    cache_bytes: int,
) -> PlannedSamplers:
    """SGLang shares its cache out by the token. Beside weights and cache it has graphs and activations, for which its
    share of the GPU, on a CPU of the host's memory, leaves room."""
    whole = machine.gpu.memory if device == "cuda" and machine.gpu is not None else machine.memory
    share = int(memory_fraction * whole)
    weights = sampler_weights(model.parameters, precision) // tensor_parallel
    room = cache_bytes // tensor_parallel
    needed = context * model.token_bytes(width_of(precision)) // tensor_parallel
    slots = max(0, min(-(-max_batch // replicas), room // needed))
    held = {"weights": weights, "cache": room, "graphs and activations": share - int(SGLANG_STATIC * share)}
    if device == "cuda":
        host = {"process": processes.CUDA}
        process = Process(
            name="sampler", count=replicas, device={**held, "cuda": CUDA_BYTES}, host=host, gpus=tensor_parallel
        )
    else:
        process = Process(name="sampler", count=replicas, host={**held, "process": processes.SAMPLER})
    return PlannedSamplers(at_once=slots * replicas, needed_bytes=needed, room=room, process=process)
