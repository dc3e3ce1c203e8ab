"""Memory of samplers and how many samples they decode at once: of RL and of evaluation, whichever engine."""

import math
from dataclasses import dataclass

from nanodag.config.derive_sampler import SGLANG_STATIC
from nanodag.config.footprint import embedded_buffers
from nanodag.config.kinds.evaluation import EvalSamplerConfig
from nanodag.config.rl_parts import SamplerConfig
from nanodag.inference.cache_size import slot_tokens
from nanodag.inference.number_formats import width_of
from nanodag.plan import host_memory
from nanodag.plan.case import Case, S
from nanodag.plan.stage_plan import Process


@dataclass(frozen=True, kw_only=True)
class PlannedSamplers:
    """at_once: samples that all of them decode together. needed_bytes: of cache, for one sample of the context; room:
    of one sampler's cache. process: one of them."""

    at_once: int
    needed_bytes: int
    room: int
    process: Process


def planned_samplers(
    case: Case[S],
    sampler: SamplerConfig | EvalSamplerConfig,
    *,
    precision: str,
    replicas: int,
    slots: int,
    context: int,
    memory_fraction: float,
    used: float,
    takes_weights: bool,
) -> PlannedSamplers:
    """Samplers of either engine. slots: samples that one of them may decode at once.

    An embedded one has a slot of the whole context for each sample. used: tokens of it that samples fill as a rule: on
    a CPU, pages of the cache that nothing was written to are never taken. takes_weights: while it runs, beside those it
    has. SGLang shares its cache out by the token. Beside weights and cache it has graphs and activations, for which
    memory_fraction, of the GPU or of the host's memory, leaves room.
    """
    model, machine, device = case.model, case.machine, case.device
    width, parallel = width_of(precision), sampler.tensor_parallel
    token, room = model.token_bytes(width), int(sampler.cache_bytes) // parallel
    if sampler.engine == "sglang":
        needed = context * token // parallel
        slots = max(0, min(slots, room // needed))
        whole = machine.gpu.memory if device == "cuda" and machine.gpu is not None else machine.memory
        share = int(memory_fraction * whole)
        held = {
            "weights": width * model.total // parallel,
            "cache": room,
            "graphs and activations": share - int(SGLANG_STATIC * share),
        }
        filled = room
    else:
        tokens = slot_tokens(context)
        needed = tokens * token
        slots = min(slots, room // needed)
        held = {
            "weights": (2 if takes_weights else 1) * width * model.total,
            "logits and buffers": embedded_buffers(model.shape, model.vocabulary, slots, tokens),
            "cache": slots * needed,
        }
        filled = slots * min(needed, slot_tokens(math.ceil(used)) * token)
    cpu = {"cache": filled, "process": host_memory.SAMPLER}
    process = host_memory.computing(
        "sampler", device, held, cpu=cpu, count=replicas, gpus=parallel, reserve=held["cache"] - filled
    )
    return PlannedSamplers(at_once=slots * replicas, needed_bytes=needed, room=room, process=process)
