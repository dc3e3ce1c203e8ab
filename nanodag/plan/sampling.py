"""What samplers hold and how many samples they decode at once: of RL, whichever engine, and of evaluation."""

from dataclasses import dataclass

from nanodag.config.footprint import CUDA_BYTES, cache_token_bytes, embedded_sampler, sampler_weights, width_of
from nanodag.host.machine import Machine
from nanodag.plan import processes
from nanodag.plan.models import PlannedModel
from nanodag.plan.stage_plan import Process
from nanodag.sampler.sizes import ATTENTION_CHUNK, DEFAULT_CACHE_BYTES

SGLANG_STATIC = 0.9
"""Of SGLang's share of a GPU, what weights and cache may take; the rest is for graphs and activations."""
CACHE_NOT_KNOWN = "auto"


@dataclass(frozen=True, kw_only=True)
class Samplers:
    """at_once: samples that all of them decode together. needed_bytes: of cache, for one sample of the context; room:
    what one sampler has for it. process: one of them; None where the model is not known."""

    at_once: int
    needed_bytes: int
    room: int
    process: Process


def slot_tokens(context: int) -> int:
    """Tokens of a slot of the embedded engine."""
    return -(-context // ATTENTION_CHUNK) * ATTENTION_CHUNK


def embedded_samplers(
    model: PlannedModel,
    *,
    precision: str,
    device: str,
    replicas: int,
    max_batch: int,
    context: int,
    cache_bytes: object,
) -> Samplers:
    """max_batch: of all replicas together. cache_bytes: of one."""
    room = int(str(cache_bytes)) if cache_bytes != CACHE_NOT_KNOWN else DEFAULT_CACHE_BYTES
    width = width_of(precision) if device == "cuda" else width_of("fp32")
    tokens = slot_tokens(context)
    needed = tokens * cache_token_bytes(model.shape, width)
    slots = min(-(-max_batch // replicas), room // needed)
    held = embedded_sampler(
        model.shape, model.vocabulary, model.parameters, precision=precision, slots=slots, context=tokens
    )
    held["cache"] = slots * needed
    if device == "cuda":
        host = {"process": processes.CUDA}
        process = Process(name="sampler", count=replicas, device={**held, "cuda": CUDA_BYTES}, host=host, gpus=1)
    else:
        process = Process(name="sampler", count=replicas, host={**held, "process": processes.SAMPLER})
    return Samplers(at_once=slots * replicas, needed_bytes=needed, room=room, process=process)


def sglang_samplers(
    model: PlannedModel,
    machine: Machine,
    *,
    precision: str,
    device: str,
    replicas: int,
    tensor_parallel: int,
    max_batch: int,
    context: int,
    memory_fraction: float,
) -> Samplers:
    """SGLang keeps a share of each GPU, on a CPU of the host's memory, and shares its cache out by the token."""
    whole = machine.gpu.memory if device == "cuda" and machine.gpu is not None else machine.memory
    share = int(memory_fraction * whole)
    weights = sampler_weights(model.shape, model.parameters, precision) // tensor_parallel
    room = int(SGLANG_STATIC * share) - weights
    needed = context * cache_token_bytes(model.shape, width_of(precision)) // tensor_parallel
    slots = max(0, min(-(-max_batch // replicas), room // needed))
    held = {"weights": weights, "cache": max(0, room), "graphs and activations": share - int(SGLANG_STATIC * share)}
    if device == "cuda":
        host = {"process": processes.CUDA}
        process = Process(
            name="sampler", count=replicas, device={**held, "cuda": CUDA_BYTES}, host=host, gpus=tensor_parallel
        )
    else:
        process = Process(name="sampler", count=replicas, host={**held, "process": processes.SAMPLER})
    return Samplers(at_once=slots * replicas, needed_bytes=needed, room=room, process=process)
