"""Plans RL: trainer ranks, samplers beside them, and the time that either takes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nanodag.config.footprint import (
    CUDA_BYTES,
    TrainState,
    activations,
    head_memory,
    lora_parameters,
    train_state,
    working,
)
from nanodag.config.gpus import num_gpus_of
from nanodag.config.kinds.rl import RLStage
from nanodag.config.model_size import ModelSize
from nanodag.config.stage_base import StageBase
from nanodag.errors.words import size
from nanodag.host.machine import Machine
from nanodag.inference.number_formats import width_of
from nanodag.plan import processes
from nanodag.plan.cpu_work import core_of
from nanodag.plan.memory import Candidate, memory_faults
from nanodag.plan.models import Habit
from nanodag.plan.programs import programs_of
from nanodag.plan.rl_work import Step, asked_at_once, mean_prompt_of, prompts_a_step, seconds_of, step_of
from nanodag.plan.sampling import PlannedSamplers, embedded_samplers, sglang_samplers
from nanodag.plan.sizes import (
    downloaded,
    held_out_share,
    held_to_read,
    longest_prompt,
    size_of,
)
from nanodag.plan.speeds import GPU_SHARES
from nanodag.plan.stage_plan import Fault, Process, StagePlan
from nanodag.plan.supervised import artifact_bytes

TOKEN_BYTES_ON_DISK = 30
"""Of a sampled token in the rollout files."""


def samplers_of(stage: RLStage, model: ModelSize, machine: Machine) -> PlannedSamplers:
    """The stage's samplers, in numbers; servers that somebody else runs take nothing of this machine."""
    planned = _planned(stage, model, machine)
    count = int(stage.sampler.replicas)
    return replace(planned, process=replace(planned.process, count=count))


def _planned(stage: RLStage, model: ModelSize, machine: Machine) -> PlannedSamplers:
    sampler, device, precision = stage.sampler, str(stage.resources.device), str(stage.sampler.precision)
    replicas = max(1, int(sampler.replicas))
    context = min(int(sampler.context), model.max_positions)
    if sampler.engine == "sglang":
        return sglang_samplers(
            model,
            machine,
            precision=precision,
            device=device,
            replicas=replicas,
            tensor_parallel=sampler.tensor_parallel,
            max_batch=int(sampler.max_batch),
            context=context,
            memory_fraction=float(sampler.memory_fraction),
            cache_bytes=int(sampler.cache_bytes),
        )
    return embedded_samplers(
        model,
        precision=precision,
        device=device,
        replicas=replicas,
        max_batch=int(sampler.max_batch),
        context=context,
        cache_bytes=int(sampler.cache_bytes),
        used=mean_prompt_of(stage, model) + stage.rollout.max_new_tokens,
    )


def planned_steps(stage: RLStage, mirror: Path | None = None) -> int | None:
    """Steps of the stage: num_steps, or num_epochs over its prompts; None where nobody knows how many these are."""
    if not stage.num_epochs:
        return stage.num_steps
    prompts = 0.0
    for source in stage.data:
        found = size_of(source.url, mirror)
        if found is None or found.rows is None:
            return None
        prompts += found.rows * (1 - held_out_share(source)) * (source.epochs or 1.0)
    return max(1, math.ceil(stage.num_epochs * prompts / stage.rollout.num_fresh))


def plan_rl(name: str, stage: RLStage, model: ModelSize | None, machine: Machine, habit: Habit = "half") -> StagePlan:
    """The plan of an RL stage. model: None where its size is not known. habit: how long the model's answers are."""
    device, rollout = str(stage.resources.device), stage.rollout
    if model is None:
        return StagePlan(
            name=name, kind=stage.kind, device=device, steps=stage.num_steps, notes=("its model is not known yet",)
        )
    samplers = samplers_of(stage, model, machine)
    step = step_of(stage, model, habit)
    flops = stage.num_steps * (
        step.trained * model.training_flops(step.length) + step.sampled * model.forward_flops(step.length)
    )
    seconds, cpu_seconds = seconds_of(stage, model, machine, samplers, step)
    trainer, sampler = _by_placement(stage, _trainer(stage, model), samplers.process)
    controller = {"process": processes.CONTROLLER, "data": held_to_read(stage.data)}
    beside = [Process(name="controller", host=controller)]
    beside.append(Process(name="rewards", count=rollout.reward_processes, host={"process": processes.REWARDS}))
    programs = programs_of(stage, max(step.samples, asked_at_once(stage)))
    read = int(stage.num_steps * prompts_a_step(stage) * step.prompt * 4)
    core = core_of(machine, str(stage.optimizer.precision))
    return StagePlan(
        name=name,
        kind=stage.kind,
        device=device,
        parameters=model.total,
        tokens=int(stage.num_steps * step.trained),
        steps=stage.num_steps,
        flops=flops,
        read_bytes=read,
        download_bytes=downloaded(stage.data, read),
        processes=((trainer,) * stage.has_trainer + (sampler,) * stage.has_samplers + (*beside, *programs)),
        num_gpus=num_gpus_of(stage, machine.num_gpus) if device == "cuda" else 0,
        at_once=samplers.at_once,
        longest_prompt=min(int(stage.sampler.context), model.max_positions) - rollout.max_new_tokens,
        disk_bytes=_disk(stage, model) + _rollouts(stage, step.kept),
        kept_bytes=artifact_bytes(model, str(stage.optimizer.precision)) + _rollouts(stage, step.kept),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        share=GPU_SHARES[str(stage.sampler.engine)].trainer if device == "cuda" else core.share(flops, cpu_seconds),
        notes=_notes(stage, step, programs),
    )


def _notes(stage: RLStage, step: Step, programs: Sequence[Process]) -> tuple[str, ...]:
    rollout = stage.rollout
    spread = f"{step.groups:.0f} of {rollout.prompts_per_step} groups a spread"
    notes = [f"responses are taken to have {step.answer:.0f} of {rollout.max_new_tokens} tokens, and {spread}"]
    if stage.has_samplers and not int(stage.sampler.replicas):
        notes.append("its time is not known, as servers of others alone sample: sampler.urls or urls_file")
    if programs:
        taken = ", ".join(f"{process.count} x {size(process.on_host)} of {process.name}" for process in programs)
        notes.append(f"{rollout.generate.name} is taken to hold {taken}; what your own code loads comes on top")
    return tuple(notes)


def faults_of_rl(plan: StagePlan, stage: RLStage, model: ModelSize | None, machine: Machine) -> list[Fault]:
    """What does not fit, and what would make the stage's results void."""
    if model is None:
        return []

    def rebuilt(changed: StageBase) -> StagePlan:
        assert isinstance(changed, RLStage)
        return plan_rl(plan.name, changed, model, machine)

    faults = memory_faults(
        plan,
        machine,
        setting="optimizer.micro_batch_tokens",
        found=stage.optimizer.micro_batch_tokens,
        candidates=_candidates(stage, model, machine),
        rebuilt=rebuilt,
    )
    return [*faults, *_void(stage, model, machine)]


def _void(stage: RLStage, model: ModelSize, machine: Machine) -> Iterator[Fault]:
    """A batch smaller than asked, a prompt without room, an answer that cannot be as long as is asked."""
    sampler, rollout, samplers = stage.sampler, stage.rollout, samplers_of(stage, model, machine)
    context, wanted = int(sampler.context), int(sampler.max_batch)
    if samplers.at_once < min(wanted, prompts_a_step(stage) * rollout.samples_per_prompt):
        why = f"samples at once, and the cache has room for {samplers.at_once}: {size(samplers.room)} a sampler, "
        why += f"{size(samplers.needed_bytes)} a sample of {context} tokens"
        yield Fault(setting="sampler.max_batch", found=str(wanted), why=why, mend=_smaller(samplers))
    room = min(context, model.max_positions) - rollout.max_new_tokens
    needed = max((longest_prompt(source.url, model.vocabulary) or 0 for source in stage.data), default=0)
    if room < needed:
        why = f"leaves {room} tokens for a prompt, and the data has prompts of about {needed}"
        if needed + rollout.max_new_tokens <= model.max_positions:
            mend = (f"sampler.context={needed + rollout.max_new_tokens}",)
        else:
            mend = (f"rollout.max_new_tokens={max(1, model.max_positions - needed)}",)
        yield Fault(setting="sampler.context", found=str(context), why=why, mend=mend)


def _smaller(samplers: PlannedSamplers) -> tuple[str, ...]:
    return (f"sampler.max_batch={samplers.at_once}",) if samplers.at_once else ()


def _trainer(stage: RLStage, model: ModelSize) -> Process:
    """One rank: policy, and where the algorithm has them reference, critic and teacher."""
    resources, optimizer, algorithm = stage.resources, stage.optimizer, stage.algorithm
    device, precision, shape = str(resources.device), str(optimizer.precision), model.shape
    ranks, micro = int(resources.num_ranks), int(optimizer.micro_batch_tokens) // optimizer.sequence_parallel
    trained = lora_parameters(shape, optimizer.lora_rank) if optimizer.lora_rank else None

    def state_of(trained: int | None = None) -> TrainState:
        return train_state(
            model.parameters,
            precision=precision,
            zero_stage=optimizer.zero_stage,
            num_ranks=ranks,
            device=device,
            offload_optimizer=resources.offload_optimizer == "cpu",
            offload_param=resources.offload_param == "cpu",
            trained=trained,
        )

    state = state_of(trained)
    checkpointing = bool(optimizer.activation_checkpointing)
    kept = activations(shape, micro, precision=precision, checkpointing=checkpointing)
    whole = width_of(precision) * model.total
    held = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "buffers": state.buffers,
        "activations": kept + working(shape, micro, precision),
        "logits": head_memory(shape, model.vocabulary, micro, precision=precision, device=device, scored=True),
    }
    if algorithm.has_reference:
        held["reference"] = whole
    if algorithm.has_critic:
        held["critic"] = state_of().total
    if algorithm.teacher.model != "none":
        held["teacher"] = whole
    compiler = processes.compiler(model, compiled=optimizer.compile, device=device)
    base = {"process": processes.TRAINER + compiler.num_bytes}
    count = ranks // resources.num_nodes
    if device == "cuda":
        host = {"process": processes.CUDA, "model": 4 * model.total, "offloaded": state.host}
        return Process(name="trainer", count=count, device={**held, "cuda": CUDA_BYTES}, host=host, gpus=1)
    return Process(name="trainer", count=count, host={**held, "offloaded": state.host, **base})


def _by_placement(stage: RLStage, trainer: Process, sampler: Process) -> tuple[Process, Process]:
    """What either keeps while the other works, and which GPUs it has to itself. Samplers on nodes of their own are
    planned as one node of them: their GPUs count beside, their host memory on a machine like this one."""
    if stage.resources.device == "cpu" or stage.placement == "beside":
        return trainer, sampler
    if stage.placement == "separate":
        own = len(stage.sampler.gpus) if isinstance(stage.sampler.gpus, tuple) else 0
        count = sampler.count // max(1, stage.sampler.nodes)
        own = own or count * sampler.gpus
        return replace(trainer, own_gpus=trainer.count), replace(sampler, count=count, own_gpus=own)
    # The sampler's graphs are not released, and CUDA's contexts stay.
    left = ("cuda", "graphs and activations")
    sampler = replace(sampler, resting=sum(sampler.device.get(name, 0) for name in left))
    names = ("weights", "gradients", "optimizer", "buffers", "reference", "critic", "teacher")
    states = {name: trainer.device[name] for name in names if name in trainer.device}
    if stage.lends_states is not True:
        return replace(trainer, resting=trainer.device["cuda"] + sum(states.values())), sampler
    # During a sync, before the sampler's cache is there, the trainer has its weights.
    host = {**trainer.host, "lent": sum(states.values()) - states["buffers"]}
    resting = trainer.device["cuda"] + max(0, states["weights"] - sampler.device["cache"])
    return replace(trainer, resting=resting, host=host), sampler


def _disk(stage: RLStage, model: ModelSize) -> int:
    """Checkpoints, the artifact, and weights on their way where memory has no room for them."""
    precision, copies = str(stage.optimizer.precision), 2 + stage.rollout.max_staleness
    exported = artifact_bytes(model, precision)
    weights = exported + copies * width_of(precision) * model.total
    weights += (1 + copies) * exported if stage.best_metric else 0  # the best so far, and those without a score yet
    weights += exported * (stage.num_steps // stage.keep_weights_every) if stage.keep_weights_every else 0
    return (stage.keep_checkpoints + 1) * 12 * model.total + weights


def _rollouts(stage: RLStage, kept: float) -> int:
    """The files of rollouts. kept: tokens a step."""
    return int(stage.num_steps * kept * TOKEN_BYTES_ON_DISK)


def _candidates(stage: RLStage, model: ModelSize, machine: Machine) -> Iterator[Candidate]:
    """Changes of the trainer, from the smallest on; then a cache of half the size with each of them, and so on, as long
    as it holds a sample."""
    for of_sampler, smaller in _smaller_caches(stage, model, machine):
        for of_trainer, changed in _smaller_trainers(smaller):
            yield (*of_sampler, *of_trainer), changed


def _smaller_caches(stage: RLStage, model: ModelSize, machine: Machine) -> Iterator[tuple[tuple[str, ...], RLStage]]:
    """The stage, then with samplers that decode fewer samples at once in a smaller cache."""
    yield (), stage
    cache_bytes = int(stage.sampler.cache_bytes) // 2
    while cache_bytes:
        updates: dict[str, object] = {"cache_bytes": cache_bytes}
        fitting = samplers_of(_with_sampler(stage, updates), model, machine).at_once
        if not fitting:
            return
        if fitting < int(stage.sampler.max_batch):
            updates["max_batch"] = fitting
        yield tuple(f"sampler.{name}={value}" for name, value in updates.items()), _with_sampler(stage, updates)
        cache_bytes //= 2


def _with_sampler(stage: RLStage, updates: Mapping[str, object]) -> RLStage:
    return stage.model_copy(update={"sampler": stage.sampler.model_copy(update=updates)})


def _smaller_trainers(stage: RLStage) -> Iterator[tuple[tuple[str, ...], RLStage]]:
    """Smaller micro-batches that hold a rollout, then with checkpointing, then with the optimizer's states in host
    memory."""
    longest, given = int(stage.sampler.context), int(stage.optimizer.micro_batch_tokens)
    micros = [given] + [tokens for tokens in (1 << k for k in range(20, 3, -1)) if longest <= tokens < given]
    if longest < micros[-1]:
        micros.append(longest)
    offloads = ("none", "cpu") if stage.resources.device == "cuda" else ("none",)
    for offload in offloads:
        for checkpointing in (False, True):
            for micro in micros:
                optimizer: dict[str, int | bool] = {
                    "micro_batch_tokens": micro,
                    "activation_checkpointing": checkpointing,
                }
                said: dict[str, object] = {
                    f"optimizer.{n}": v for n, v in optimizer.items() if getattr(stage.optimizer, n) != v
                }
                if stage.resources.offload_optimizer != offload:
                    said["resources.offload_optimizer"] = offload
                changed = stage.model_copy(
                    update={
                        "optimizer": stage.optimizer.model_copy(update=optimizer),
                        "resources": stage.resources.model_copy(update={"offload_optimizer": offload}),
                    }
                )
                yield tuple(f"{name}={str(value).lower()}" for name, value in said.items()), changed
