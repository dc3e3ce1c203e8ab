"""Plans pretraining, midtraining and SFT."""

import math
from collections.abc import Iterator
from pathlib import Path

from nanodag.config.footprint import (
    CUDA_BYTES,
    MAX_LOGITS,
    activations,
    documents_apart,
    head_memory,
    num_states,
    train_state,
    working,
)
from nanodag.config.model_size import ModelSize
from nanodag.config.stage_base import StageBase
from nanodag.config.supervised import ChatStage, SupervisedStage
from nanodag.errors.words import counted
from nanodag.host.machine import Machine
from nanodag.inference.number_formats import width_of
from nanodag.plan import cpu_work, processes
from nanodag.plan.core_sizes import CORE_CONTEXT, core_items, core_tokens
from nanodag.plan.cpu_work import CpuWork, core_of
from nanodag.plan.evaluation import ANSWERS_SHARE
from nanodag.plan.memory import Candidate, memory_faults
from nanodag.plan.sizes import (
    attended_length,
    bytes_per_token,
    downloaded,
    held_out_share,
    held_out_tokens,
    held_to_read,
    in_memory,
    tokens_of_pass,
)
from nanodag.plan.speeds import GPU_SHARES, PACKED_TOKENS_S, START_S, gpu_peak
from nanodag.plan.stage_plan import Fault, Process, StagePlan

COMPILED_SHARE = 0.65
"""Of a layer's activations, that a compiled one keeps."""


def plan_supervised(
    name: str, stage: SupervisedStage, model: ModelSize | None, machine: Machine, mirror: Path | None = None
) -> StagePlan:
    """The plan of one stage of the supervised loop. model: None where its size is not known. mirror: a folder that
    stands for the hub."""
    device, notes = str(stage.resources.device), []
    tokens = planned_tokens(stage, model, mirror)
    batch = int(stage.batch_tokens)
    steps = None if tokens is None else math.ceil(tokens / batch)
    if stage.max_steps:
        steps = min(steps, stage.max_steps) if steps is not None else stage.max_steps
    if steps is None:
        notes.append("tokens of its data are not known beforehand")
    if stage.patience:
        notes.append(f"may end sooner (patience {stage.patience})")
    if stage.core_every:
        every = f"every {stage.core_every:,} steps and at the end"
        notes.append(f"CORE {every}, {counted(core_items(stage.core_limit), 'item')} each time")
    tokens = None if steps is None else steps * batch
    if model is None:
        return StagePlan(
            name=name, kind=stage.kind, device=device, tokens=tokens, steps=steps, notes=("its model is not known yet",)
        )
    flops = None if tokens is None else float(tokens) * model.training_flops(stage.sequence_length)
    read = None if tokens is None else int((tokens + _validated(stage)) * bytes_per_token(model.vocabulary))
    seconds, cpu_seconds = _seconds(stage, model, machine, steps, mirror)
    return StagePlan(
        name=name,
        kind=stage.kind,
        device=device,
        parameters=model.total,
        tokens=tokens,
        steps=steps,
        flops=flops,
        read_bytes=read,
        download_bytes=None if read is None else downloaded(stage.data, read),
        processes=_processes(stage, model, mirror),
        num_gpus=int(stage.resources.num_ranks) // stage.resources.num_nodes if device == "cuda" else 0,
        disk_bytes=_disk(stage, model),
        kept_bytes=artifact_bytes(model, str(stage.precision)),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        share=GPU_SHARES["embedded"].training
        if device == "cuda"
        else core_of(machine, str(stage.precision)).share(flops, cpu_seconds),
        notes=tuple(notes),
    )


def faults_of_supervised(
    plan: StagePlan, stage: SupervisedStage, model: ModelSize | None, machine: Machine, mirror: Path | None = None
) -> list[Fault]:
    """What of the stage does not fit the machine."""
    if model is None:
        return []

    def rebuilt(changed: StageBase) -> StagePlan:
        assert isinstance(changed, SupervisedStage)
        return plan_supervised(plan.name, changed, model, machine, mirror)

    return memory_faults(
        plan,
        machine,
        setting="micro_batch_tokens",
        found=stage.micro_batch_tokens,
        candidates=_candidates(stage),
        rebuilt=rebuilt,
    )


def planned_tokens(stage: SupervisedStage, model: ModelSize | None, mirror: Path | None = None) -> int | None:
    """Tokens of the whole training: its horizon, or passes over its data where their size is known."""
    if stage.horizon_tokens not in ("auto", 0):
        return int(stage.horizon_tokens)
    if not isinstance(stage, ChatStage) or model is None:
        return None
    one_pass = tokens_of_pass(stage.data, model.vocabulary, is_chat=True, mirror=mirror)
    return None if one_pass is None else int(one_pass * stage.num_epochs)


def core_tokens_of(stage: SupervisedStage, model: ModelSize, steps: int) -> float:
    """Tokens that CORE reads during so many steps and at the end."""
    times = (steps - 1) // stage.core_every + 1 if stage.core_every else 0
    return times * core_tokens(stage.core_limit, model.vocabulary)


def _validated(stage: SupervisedStage) -> float:
    """Tokens that must be read to hold out those of the validation by a hash, which are kept."""
    shares = [share for source in stage.data if (share := held_out_share(source))]
    return stage.validation_tokens / max(shares) if shares else 0.0


def _processes(stage: SupervisedStage, model: ModelSize, mirror: Path | None) -> tuple[Process, ...]:
    resources, precision, device = stage.resources, str(stage.precision), str(stage.resources.device)
    micro, ranks = int(stage.micro_batch_tokens), int(resources.num_ranks)
    state = train_state(
        model.parameters,
        precision=precision,
        zero_stage=stage.zero_stage,
        num_ranks=ranks,
        optimizer=stage.optimizer.name,
        device=device,
        offload_optimizer=resources.offload_optimizer == "cpu",
        offload_param=resources.offload_param == "cpu",
    )
    shape, checkpointing = model.shape, bool(stage.activation_checkpointing)
    kept = activations(shape, micro, precision=precision, checkpointing=checkpointing)
    compiled = COMPILED_SHARE if stage.compile and not checkpointing else 1.0
    held = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "buffers": state.buffers,
        "activations": int(compiled * kept)
        + working(shape, micro, precision)
        + documents_apart(shape, micro, precision=precision, device=device, checkpointing=checkpointing),
        "logits": head_memory(shape, model.vocabulary, micro, precision=precision, device=device),
    }
    if stage.core_every:  # its passes hold less than a micro-batch's, but for the head's
        largest = min(MAX_LOGITS[device], model.vocabulary * max(micro, model.max_positions))
        held["logits"] = max(held["logits"], largest * (width_of(precision) + 4))
    if stage.patience:
        held["best weights"] = 4 * model.total // (ranks if stage.zero_stage else 1)
    compiler = processes.compiler(model, compiled=stage.compile, device=device)
    base = {"process": processes.TRAINER + compiler.num_bytes, "data": _data(stage, mirror)}
    here = ranks // resources.num_nodes
    launcher = (Process(name="launcher", host={"process": processes.LAUNCHER}),) if ranks > 1 else ()
    if device == "cuda":
        host = {"process": processes.CUDA, "data": base["data"], "model": 4 * model.total, "offloaded": state.host}
        return (
            Process(name="rank", count=here, device={**held, "cuda": CUDA_BYTES}, host=host, gpus=1),
            *launcher,
        )
    host = {**held, "offloaded": state.host, **base}
    return (Process(name="rank", count=here, host=host), *launcher)


def _data(stage: SupervisedStage, mirror: Path | None) -> int:
    """Of what is read, and of the packer's buffer."""
    return held_to_read(stage.data, mirror) + 20 * processes.MB


def _disk(stage: SupervisedStage, model: ModelSize) -> int:
    """Checkpoints with master weights and states in float32, one more while it is written, and the artifact."""
    states = num_states(model.parameters, stage.optimizer.name, model.total)
    checkpoint = 4 * (model.total + states) + (4 * model.total if stage.patience else 0)
    return (stage.keep_checkpoints + 1) * checkpoint + artifact_bytes(model, str(stage.precision))


def artifact_bytes(model: ModelSize, precision: str) -> int:
    """Of a model as it is published, with its tokenizer."""
    return (2 if precision == "bf16" else 4) * model.total + 100 * model.vocabulary


def _seconds(
    stage: SupervisedStage, model: ModelSize, machine: Machine, steps: int | None, mirror: Path | None
) -> tuple[float | None, float | None]:
    """By the clock, and of a CPU's cores."""
    if steps is None:
        return None, None
    if stage.resources.device == "cuda":
        return _gpu_seconds(stage, model, machine, steps, mirror), None
    ranks, threads = int(stage.resources.num_ranks), int(stage.resources.threads)
    core = core_of(machine, str(stage.precision))
    tokens, is_chat = steps * int(stage.batch_tokens), isinstance(stage, ChatStage)
    length = attended_length(stage.data, model.vocabulary, stage.sequence_length, is_chat=is_chat, mirror=mirror)
    work = core.training(model, tokens, length, checkpointing=bool(stage.activation_checkpointing))
    work += core.reading(model, _validations(stage, model, steps, mirror), length)
    work += core.reading(model, core_tokens_of(stage, model, steps), CORE_CONTEXT, scored=ANSWERS_SHARE)
    work += CpuWork(0.0, tokens * cpu_work.TOKEN_S + ranks * steps * cpu_work.STEP_S)
    parsed = in_memory(stage.data) / processes.PARSED_BYTES_S
    compiler = processes.compiler(model, compiled=stage.compile, device="cpu")
    start = processes.TRAINER_S + compiler.seconds + parsed
    side_by_side = max(1, min(ranks, machine.cores))
    busy = cpu_work.RANKS_BUSY if ranks > 1 else 1.0
    seconds = (ranks * start + work.on(threads) / busy) / side_by_side
    return seconds, ranks * start + work.total


def _validations(stage: SupervisedStage, model: ModelSize, steps: int, mirror: Path | None) -> float:
    """Tokens that the validations read."""
    held_out = held_out_tokens(stage.data, model.vocabulary, is_chat=isinstance(stage, ChatStage), mirror=mirror)
    validated = stage.validation_tokens if held_out is None else min(stage.validation_tokens, held_out)
    return (steps // stage.validation_every + 1) * validated


def _gpu_seconds(
    stage: SupervisedStage, model: ModelSize, machine: Machine, steps: int, mirror: Path | None
) -> float | None:
    ranks = int(stage.resources.num_ranks)
    peak = gpu_peak(machine, str(stage.precision), ranks=ranks)
    if not peak:
        return None
    tokens = steps * int(stage.batch_tokens)
    again = 4 / 3 if stage.activation_checkpointing else 1.0
    shares = GPU_SHARES["embedded"]
    worked = tokens * again + _validations(stage, model, steps, mirror) / 3
    computing = worked * model.training_flops(stage.sequence_length) / (shares.training * peak)
    scoring = core_tokens_of(stage, model, steps) * model.forward_flops(CORE_CONTEXT) / (shares.likelihood * peak)
    return START_S + max(computing, tokens / (ranks * PACKED_TOKENS_S)) + scoring


def _candidates(stage: SupervisedStage) -> Iterator[Candidate]:
    """Smaller micro-batches that divide a step, from the largest on; then the same with checkpointing, then ZeRO 3."""
    resources, length = stage.resources, stage.sequence_length
    rows = max(1, int(stage.batch_tokens) // (int(resources.num_ranks) * length))
    smaller = [r * length for r in range(rows, 0, -1) if rows % r == 0 and r * length <= int(stage.micro_batch_tokens)]
    for changes in ({}, {"activation_checkpointing": True}, {"activation_checkpointing": True, "zero_stage": 3}):
        for micro in smaller:
            updates = {"micro_batch_tokens": micro, **changes}
            said = {name: str(value).lower() for name, value in updates.items() if getattr(stage, name) != value}
            yield tuple(f"{name}={value}" for name, value in said.items()), stage.model_copy(update=updates)
