"""Values of `auto` in the settings of samplers, in RL and in evaluation: pure functions of a machine, each with its
rule.

Samplers share GPUs with what trains or scores there, and nobody knows who starts first. So a sampler's memory is an
amount, a share of the whole device, and never a share of what is free at the moment.
"""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from nanodag.config.footprint import USABLE
from nanodag.config.model_size import ModelSize
from nanodag.config.rl_parts import GUESTS_ONLY, EngineConfig, SamplerConfig
from nanodag.config.section import Filler, Part
from nanodag.config.stage_base import Resources
from nanodag.errors import ConfigError
from nanodag.errors.words import counted
from nanodag.host.machine import GIB, Machine, detect
from nanodag.inference.cache_size import slot_tokens
from nanodag.inference.engine_install import SGLANG_CAPABILITY, engine_environment
from nanodag.inference.number_formats import width_of
from nanodag.inference.sglang_options import check_no_window

if TYPE_CHECKING:
    from nanodag.config.kinds.evaluation import EvalStage
    from nanodag.config.kinds.rl import RLStage

_RL = TypeVar("_RL", bound="RLStage")
_Eval = TypeVar("_Eval", bound="EvalStage")

MAX_CPU_REPLICAS = 4
REPLICA_FLOPS = 2e11  # what starting another sampler of an evaluation costs: some 3 s of a core
MAX_BATCH = {"cpu": 64, "cuda": 256}  # samples a replica decodes at once: more are hardly faster, and hold more cache
SCORED_TOKENS = {"cpu": 1024, "cuda": 16_384}  # that an evaluation scores at once; on a CPU more leave its caches
PROMPT_TOKENS = 1024  # room for a prompt: three times GSM8K's longest question
SHARE_BESIDE_TRAINER = 0.4  # of a GPU: weights twice while they change, and the cache; the rest is the trainer's
SHARE_IN_TURNS = 0.8  # of a GPU: the trainer's context and, during a sync, its weights stay
SHARE_ALONE = 0.9
SHARE_IN_EVALUATION = 0.7  # of a GPU: the rest is for the model that scores likelihoods
BESIDE_IN_EVALUATION = 9 * GIB // 2  # two CUDA contexts, activations and logits
SHARE_OF_HOST = 0.25  # of a CPU's memory, for all replicas; pages that no sample touches are never taken
SGLANG_STATIC = 0.9  # of its share; the rest is for its graphs and activations
SGLANG_HEADS = (64, 128, 256)  # widths of a head that its attention kernels are built for
LARGEST_EMBEDDED = 2e9  # parameters that the embedded engine decodes on a GPU where SGLang is there
VERIFY_EVERY = 20
# Mean size of old less sampler log-probability, in nats a token, above which the sampler has other weights.
LARGEST_MISMATCH = {"fp32": 0.01, "bf16": 0.3}
INSTALL = "`nanodag sampler install --cuda` makes SGLang's environment"


def this_machine() -> Machine:
    """The machine that this is, with SGLang where its environment for GPUs is finished, or its interpreter named."""
    machine = detect()
    if machine.gpu is None:
        return machine
    installed = engine_environment("cuda")
    is_here = bool(os.environ.get(installed.variable)) or installed.is_installed(installed.folder)
    return replace(machine, sglang=is_here)


def engine_of(machine: Machine, device: str, model: ModelSize | None) -> tuple[str, str]:
    """The engine, and why: SGLang on GPUs where it is installed and runs, else the embedded one."""
    if device != "cuda" or machine.gpu is None:
        return "embedded", "on a CPU"
    if machine.gpu.capability < SGLANG_CAPABILITY:
        return "embedded", f"SGLang needs compute capability {SGLANG_CAPABILITY}, and this is {machine.gpu.capability}"
    if model is not None and model.shape.head_width not in SGLANG_HEADS:
        return "embedded", f"SGLang has no attention kernels for heads of {model.shape.head_width}"
    if model is not None and model.window is not None:
        return "embedded", f"SGLang leaves out the model's sliding window of {model.window} tokens"
    if not machine.sglang:
        return "embedded", f"SGLang is not installed; {INSTALL}"
    return "sglang", "SGLang is installed"


def replicas_of(resources: Resources, gpus: int, tensor_parallel: int, *, is_exact: bool) -> tuple[int, str]:
    """Number of samplers, and why. gpus: that the stage has. is_exact: each is deterministic.

    A sum that is split over threads has other bits, so a deterministic sampler has one thread, and several of them
    share the cores; another one on a CPU has all threads.
    """
    if resources.device == "cuda":
        return max(1, gpus // tensor_parallel), "one for each GPU"
    if is_exact:
        return min(int(resources.threads), MAX_CPU_REPLICAS), f"a thread each, {MAX_CPU_REPLICAS} at most"
    return 1, "one with all threads"


def room_for_cache(machine: Machine, device: str, sampler: EngineConfig, share: float, replicas: int) -> int:
    """Bytes that one replica's weights and cache may take. share: of each GPU that it runs on, or of the host's memory
    for all replicas."""
    if device != "cuda" or machine.gpu is None:
        return int(share * machine.memory / replicas)
    usable = 1.0 if sampler.engine == "embedded" else SGLANG_STATIC
    return int(share * usable * machine.gpu.memory * sampler.tensor_parallel)


def derive_sampler(name: str, stage: _RL, machine: Machine, model: ModelSize | None, origins: dict[str, str]) -> _RL:
    """The stage with no `auto` among what concerns samplers. model: None where its size is not known beforehand."""
    config, device = stage.sampler, str(stage.resources.device)
    fill = Filler(config, f"{name}.sampler", origins)
    context = fill("context", *_context(stage, model))
    engine, tensor_parallel = _filled_engine(fill, config, machine, device, model, context)
    is_exact = fill("deterministic", engine == "embedded" and device == "cpu", f"engine {engine} on {device}")
    precision = fill("precision", stage.optimizer.precision, "the trainer's: two precisions would differ in their draw")
    gpus = _gpus_of_samplers(stage, machine)
    replicas, why = replicas_of(stage.resources, gpus, tensor_parallel, is_exact=is_exact)
    if config.nodes:
        replicas, why = config.nodes * replicas, f"{why}, on {counted(config.nodes, 'node')} of their own"
    if config.has_others:
        replicas, why = 0, "sampler.urls and urls_file name servers of others"
    replicas = fill("replicas", replicas, why)
    replicas = max(1, replicas)  # where it has none of its own, what follows is of one that it would start
    share = fill("memory_fraction", *_share(stage))
    room = room_for_cache(machine, device, fill.filled, share, replicas // max(1, config.nodes))
    if model is not None:  # all but SGLang hold their weights twice while they change
        room -= model.total * width_of(precision) * (1 if engine == "sglang" else 2)
    rollout = stage.rollout
    samples = max(rollout.over_sampling, rollout.prompts_per_step) * rollout.samples_per_prompt
    at_once, why = min(samples, MAX_BATCH["cuda"] * replicas), f"{samples} samples a step"
    if model is None:
        fill("max_batch", max(replicas, at_once), why)
        fill("cache_bytes", max(1, room // 2), f"half of {_gib(room)} a replica, whose weights are not known yet")
    else:
        slot = slot_tokens(context) * model.token_bytes(width_of(precision))
        fitting = max(1, room // slot) * replicas
        if engine == "embedded":  # the others share their cache out by the page, as far as samples have come
            at_once, why = min(at_once, fitting), f"{why}, {fitting} fit"
        max_batch = fill("max_batch", max(replicas, at_once), why)
        if engine == "embedded" and max_batch > fitting:
            origins[f"{name}.sampler.max_batch!"] = f"{fitting} fit in {_gib(room)} a replica"
        each = -(-max_batch // replicas)
        why = f"{each} samples of {context} tokens, at most {_gib(room)} a replica"
        fill("cache_bytes", max(slot, min(each * slot, room)), why)
    fill("start_timeout_s", 120.0 if engine == "embedded" else 900.0, f"engine {engine}")
    of_weights = Filler(stage.weights, f"{name}.weights", origins)
    sync, why = weights_way(stage, replicas * tensor_parallel)
    of_weights("sync", "distributed" if sync == "nccl" else sync, why)
    if sync == "nccl" and stage.weights.sync == "auto":
        of_weights.updates["sync_backend"] = "nccl"
    is_blind = engine == "vllm" or (engine == "sglang" and device == "cuda") or tensor_parallel > 1
    why = f"engine {engine} on {device}" + ", whose weights cannot be verified yet" * is_blind
    of_weights("sync_check_every", 0 if is_blind else VERIFY_EVERY, why)
    coarsest = "bf16" if "bf16" in (stage.optimizer.precision, precision) else "fp32"
    of_weights("mismatch_limit", LARGEST_MISMATCH[coarsest], f"{coarsest} on one of the two sides")
    of_rollout = Filler(rollout, f"{name}.rollout", origins)
    of_rollout("order", *_order(stage))
    return stage.model_copy(update={"sampler": fill.filled, "weights": of_weights.filled, "rollout": of_rollout.filled})


def _filled_engine(
    fill: Filler[Part], config: EngineConfig, machine: Machine, device: str, model: ModelSize | None, context: int
) -> tuple[str, int]:
    """The engine, and GPUs of one sampler. What was set for SGLang means nothing to the embedded one.

    Raises ConfigError for a model that is to be split over GPUs, or too large on a GPU where SGLang is there, where the
    embedded engine is taken; and for one with a window that SGLang would leave out."""
    is_of_others = isinstance(config, SamplerConfig) and config.has_others  # there it is installed by others
    is_here = machine.sglang or config.python != "auto" or is_of_others
    best, why = engine_of(replace(machine, sglang=is_here), device, model)
    engine = fill("engine", best, f"{machine}: {why}")
    if engine != "embedded":
        if model is not None and engine == "sglang":
            check_no_window(model.window, context, f"{fill.name}.engine")
        return engine, config.tensor_parallel
    if best == "sglang" and not is_of_others and model is not None and model.total > LARGEST_EMBEDDED:
        raise ConfigError(
            f"{fill.name}.engine embedded has no CUDA graphs, so on a GPU it is for models of up to "
            f"{LARGEST_EMBEDDED / 1e9:g} B parameters, and this one has {model.total / 1e9:.1f} B; leave it at auto: "
            f"{why}."
        )
    if config.tensor_parallel > 1:
        raise ConfigError(
            f"{fill.name}.tensor_parallel: {config.tensor_parallel} GPUs share a model with sglang or vllm only, and "
            f"{fill.name}.engine auto is the embedded one here ({why}), which takes one. Leave it out; or, for another "
            "machine, say which: --on 8xH100+sglang."
        )
    fields = type(config).model_fields
    fill.updates |= {name: fields[name].get_default(call_default_factory=True) for name in GUESTS_ONLY}
    return engine, 1


def weights_way(stage: "RLStage", sampler_gpus: int) -> tuple[str, str]:
    """Weights' way to the samplers: `disk`, `ipc` or `nccl`; and why. sampler_gpus: that all of its own samplers want.

    Handles where an engine is on a rank's GPU, as NCCL refuses two processes on one; NCCL where it has one to itself.
    """
    ranks_here = int(stage.resources.num_ranks) // stage.resources.num_nodes
    if stage.resources.device == "cpu":
        return "disk", "on a CPU a folder is in memory, or on what all machines share"
    if not stage.has_trainer:
        return "disk", "nothing is trained"
    if stage.weights.lora_sync == "adapter" and stage.sampler.engine != "embedded":
        return "disk", "it takes adapters as a folder"
    if stage.sampler.engine == "vllm":
        return "disk", "vLLM has another torch on GPUs than the trainer"
    if stage.sampler.has_others:
        return "disk", "of servers of others nobody knows on which GPUs they are"
    if stage.placement == "separate":
        return "nccl", "samplers have GPUs of their own"
    if sampler_gpus <= ranks_here:
        return "ipc", "each sampler is on a rank's GPU"
    return "disk", "some samplers are on GPUs without a rank"


def _order(stage: "RLStage") -> tuple[str, str]:
    """`arrival` needs requests that stay in flight while weights change."""
    if stage.weights.sync_mode == "finish":
        return "prompt", "sync_mode finish"
    choosing = ("over_sampling", "partial_rollout_tokens")  # groups, in the order of their prompts
    chosen = next((name for name in choosing if getattr(stage.rollout, name)), "")
    return ("prompt", chosen) if chosen else ("arrival", f"sync_mode {stage.weights.sync_mode}")


def _gpus_of_samplers(stage: "RLStage", machine: Machine) -> int:
    """GPUs of a node that has samplers."""
    if stage.sampler.nodes:
        return machine.num_gpus
    if stage.placement == "separate" and isinstance(stage.sampler.gpus, tuple):
        return len(stage.sampler.gpus)
    return int(stage.resources.num_ranks) // stage.resources.num_nodes


def _share(stage: "RLStage") -> tuple[float, str]:
    """Share of a GPU, or of a CPU's memory for all samplers of a node; and why."""
    if stage.resources.device == "cpu":
        return SHARE_OF_HOST, f"{SHARE_OF_HOST} of the host's memory, the rest is the trainer's"
    if stage.placement == "shared":
        return SHARE_IN_TURNS, f"{SHARE_IN_TURNS} of a GPU, which the trainer has in its turn"
    if stage.placement == "separate":
        return SHARE_ALONE, f"{SHARE_ALONE} of a GPU of their own"
    return SHARE_BESIDE_TRAINER, f"{SHARE_BESIDE_TRAINER} of a GPU, the rest is the trainer's"


def _context(stage: "RLStage", model: ModelSize | None) -> tuple[int, str]:
    """The longest response and room for a prompt, as far as the model and a trainer's micro-batch hold it."""
    turns = 1 if stage.rollout.generate.is_one_turn else 2  # tools say something, too
    answers = [int(b.max_new_tokens) for b in stage.evaluation.benchmarks if b.max_new_tokens != "auto"]
    longest = max(stage.rollout.max_new_tokens, *answers, 0)
    context = slot_tokens(longest + turns * PROMPT_TOKENS)
    limits = {"max_new_tokens and room for a prompt": context}
    if model is not None:
        limits["the model's positions"] = model.max_positions
    if stage.optimizer.micro_batch_tokens != "auto":
        limits["optimizer.micro_batch_tokens"] = int(stage.optimizer.micro_batch_tokens)
    why = min(limits, key=lambda limit: limits[limit])
    return limits[why], why


def derive_evaluation(
    name: str, stage: _Eval, machine: Machine, model: ModelSize | None, origins: dict[str, str]
) -> _Eval:
    """The evaluation with no `auto` among what concerns its samplers and their answers. The context is what each
    benchmark needs, so it is no setting."""
    config, device = stage.sampler, str(stage.resources.device)
    fill = Filler(config, f"{name}.sampler", origins)
    context = 0 if model is None else model.max_positions
    engine, tensor_parallel = _filled_engine(fill, config, machine, device, model, context)
    gpus = stage.resources.gpus_per_node or machine.num_gpus
    replicas, why = replicas_of(stage.resources, gpus, tensor_parallel, is_exact=engine == "embedded")
    replicas = fill("replicas", replicas, f"{machine}, {why}")
    fill("max_batch", MAX_BATCH[device], f"on {device}, as far as the cache holds them")
    share, why = (SHARE_IN_EVALUATION, "of a GPU") if device == "cuda" else (SHARE_OF_HOST, "of the host's memory")
    weights = 0 if model is None else model.total * width_of(str(stage.precision))
    room = room_for_cache(machine, device, fill.filled, share, replicas) - weights
    if device == "cuda" and machine.gpu is not None:  # as far as there is room, for the weights that score too
        left = int(USABLE * machine.gpu.memory) - BESIDE_IN_EVALUATION
        beside = min(room, tensor_parallel * (left - weights) - weights)
        alone = tensor_parallel * left - weights
        room, share = (beside, share) if beside > 0 else (alone, left / machine.gpu.memory)
    why += f" for {'a replica' if device == 'cuda' else 'all'}, less weights"
    fill("cache_bytes", max(1, room), f"{share:.2g} {why}")
    benchmarks = []
    for number, benchmark in enumerate(stage.benchmarks):
        answers = Filler(benchmark, f"{name}.benchmarks.{number}", origins)
        answers("seed", stage.seed, "the stage's seed")
        answers("max_new_tokens", stage.max_new_tokens, "the stage's max_new_tokens")
        benchmarks.append(answers.filled)
    scored = Filler(stage, name, origins)
    scored("micro_batch_tokens", SCORED_TOKENS[device], f"on {device}")
    return scored.filled.model_copy(update={"sampler": fill.filled, "benchmarks": tuple(benchmarks)})


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
