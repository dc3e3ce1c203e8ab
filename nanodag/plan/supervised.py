"""Plans pretraining, midtraining and SFT."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from nanodag.config import footprint
from nanodag.config.derive import state_of, token_bytes
from nanodag.config.derive_sampler import derive_evaluation
from nanodag.config.kinds.evaluation import EvalStage
from nanodag.config.kinds.rl import RLStage
from nanodag.config.model_size import ModelSize
from nanodag.config.stage_base import TrainedStage
from nanodag.config.supervised import SupervisedStage
from nanodag.errors.words import counted, size
from nanodag.inference.number_formats import width_of
from nanodag.plan import host_memory
from nanodag.plan.case import Case, Changed, Formula, changed
from nanodag.plan.evaluation import plan_evaluation
from nanodag.plan.sizes import CORE_CONTEXT, bytes_per_token, core_items, core_tokens, held_out_share
from nanodag.plan.speeds import SPEEDS
from nanodag.plan.stage_plan import Process, StagePlan

COMPILED_SHARE = 0.65
"""Share of a layer's activations that a compiled one keeps."""


def plan_supervised(case: Case[SupervisedStage]) -> StagePlan:
    stage, steps = case.stage, _steps(case)
    notes = [] if steps is not None else ["tokens of its data are not known beforehand"]
    if stage.patience:
        notes.append(f"may end sooner (patience {stage.patience})")
    asked = _asked(case)
    if asked is not None:
        names = ", ".join(benchmark.name for benchmark in stage.benchmarks)
        notes.append(f"asks {names} every {stage.benchmarks_every:,} steps and at the end")
    if stage.core_every:
        items = counted(core_items(stage.core_limit), "item")
        notes.append(f"CORE every {stage.core_every:,} steps and at the end, {items} each time")
    if stage.is_from_scratch and case.known_model and case.known_model.max_positions > stage.sequence_length:
        most = f"{case.known_model.max_positions:,} positions, of which training reaches {stage.sequence_length:,}"
        notes.append(f"declares {most}")
    tokens = None if steps is None else steps * int(stage.batch_tokens)
    if case.known_model is None:
        return case.plan(tokens=tokens, steps=steps, notes=("its model is not known yet",))
    model, resources, precision = case.model, stage.resources, str(stage.precision)
    flops = None if tokens is None else float(tokens) * model.training_flops(stage.sequence_length)
    shares = [share for source in stage.data if (share := held_out_share(source))]
    # What must be read to hold out the validation's tokens by a hash, which are kept.
    validated = stage.validation_tokens / max(shares) if shares else 0.0
    read = None if tokens is None else int((tokens + validated) * bytes_per_token(model.vocabulary))
    text = sum(case.sizes.text_bytes(source.url) for source in stage.data)
    if read is not None and 0 < text < read and all(source.url.startswith("file:") for source in stage.data):
        notes.append(f"its data of {size(text)} are passed {read / text:.1f} times")
        read = text
    learned = footprint.lora_parameters(model.shape, stage.lora_rank) if stage.lora_rank else model.total
    checkpoint = footprint.saved_bytes(model.parameters, stage.optimizer.name, learned)
    checkpoint += 4 * learned if stage.patience else 0
    asked_bytes = 0 if asked is None else width_of(precision) * model.total  # of the folder that is asked, for a while
    return case.plan(
        parameters=model.total,
        tokens=tokens,
        steps=steps,
        flops=flops,
        read_bytes=read,
        processes=(*_processes(case), *(() if asked is None else asked.processes)),
        num_gpus=int(resources.num_ranks) // resources.num_nodes if case.device == "cuda" else 0,
        disk_bytes=(stage.keep_checkpoints + 1) * checkpoint + artifact_bytes(stage, model) + asked_bytes,
        kept_bytes=artifact_bytes(stage, model),
        seconds=_seconds(case, steps, asked),
        share=case.trainers(precision).shares.training,
        notes=tuple(notes),
    )


def _asked(case: Case[SupervisedStage]) -> StagePlan | None:
    """One evaluation on the benchmarks that it asks, whose processes stand beside the trainer's; None without any."""
    asked = case.stage.own_evaluation("model")
    if asked is None or case.known_model is None:
        return None
    derived = derive_evaluation(case.name, asked, case.machine, case.known_model, {})
    return plan_evaluation(cast(Case[EvalStage], replace(case, stage=derived)))  # type: ignore[arg-type]


def _steps(case: Case[SupervisedStage]) -> int | None:
    """Steps of the whole training: of its horizon, or of passes over its data where their size is known."""
    stage, tokens = case.stage, None
    if stage.horizon_tokens not in ("auto", 0):
        tokens = int(stage.horizon_tokens)
    elif stage.passes and case.known_model is not None:
        one_pass = case.sizes.tokens_of_pass(stage.data, case.model.vocabulary)
        tokens = None if one_pass is None else int(one_pass * stage.passes)
    limits = [stage.max_steps] if stage.max_steps else []
    limits += [] if tokens is None else [math.ceil(tokens / int(stage.batch_tokens))]
    return min(limits, default=None)


def _processes(case: Case[SupervisedStage]) -> tuple[Process, ...]:
    stage, model, device = case.stage, case.model, case.device
    micro, ranks = int(stage.micro_batch_tokens) // stage.sequence_parallel, int(stage.resources.num_ranks)
    kept_share = COMPILED_SHARE if stage.compile and not stage.activation_checkpointing else 1.0
    state, held = held_to_train(stage, model, micro, kept_share)
    if stage.core_every:  # its passes hold less than a micro-batch's, but for the head's
        largest = min(footprint.MAX_LOGITS[device], model.vocabulary * max(micro, model.max_positions))
        held["logits"] = max(held["logits"], largest * (width_of(str(stage.precision)) + 4))
    if stage.patience:
        held["best weights"] = 4 * model.total // (ranks if stage.zero_stage else 1)
    compiler = host_memory.compiler_bytes(model, compiled=stage.compile, device=device)
    data = case.sizes.held_to_read(stage.data) + host_memory.BYTES["packer"]
    in_shares = stage.zero_stage == 3 and not stage.is_from_scratch
    rank = host_memory.computing(
        "rank",
        device,
        held,
        cuda={"data": data, "model": loaded_bytes(model, in_shares=in_shares), "offloaded": state.host},
        cpu={"offloaded": state.host, "process": host_memory.BYTES["trainer"] + compiler, "data": data},
        count=ranks // stage.resources.num_nodes,
    )
    launcher = (Process(name="launcher", host={"process": host_memory.BYTES["launcher"]}),) if ranks > 1 else ()
    return rank, *launcher


def loaded_bytes(model: ModelSize, *, in_shares: bool) -> int:
    """Bytes of host memory in which a rank on a GPU has the weights before they are there: all in float32; read in
    shares, under ZeRO-3, one tensor at a time, of which the embedding counts."""
    return 4 * (model.vocabulary * model.shape.width if in_shares else model.total)


def held_to_train(
    stage: TrainedStage, model: ModelSize, micro: int, kept_share: float = 1.0
) -> tuple[footprint.TrainState, dict[str, int]]:
    """Memory of a rank for the model that it trains, and all bytes on its device, by what holds them. micro: tokens at
    once. kept_share: of the activations, that layers keep."""
    checkpointed, device = bool(stage.trainer.activation_checkpointing), str(stage.resources.device)
    state = state_of(stage, model, num_ranks=int(stage.resources.num_ranks))
    kept = token_bytes(stage, model, micro, checkpointed=checkpointed, kept_share=kept_share)
    precision, scored = str(stage.trainer.precision), stage.scores_tokens
    logits = footprint.head_memory(
        model.shape, model.vocabulary, micro, precision=precision, device=device, scored=scored
    )
    return state, {**state.on_device, "activations": kept, "logits": logits}


def artifact_bytes(stage: SupervisedStage | RLStage, model: ModelSize) -> int:
    """Bytes of what a stage that trains publishes, with the tokenizer: a model, or adapters alone."""
    rank = stage.lora_rank if stage.optimizer.lora_save == "adapter" else 0
    parameters = footprint.lora_parameters(model.shape, rank) if rank else model.total
    return width_of(str(stage.trainer.precision)) * parameters + 100 * model.vocabulary


def _seconds(case: Case[SupervisedStage], steps: int | None, asked: StagePlan | None) -> float | None:
    stage, model, resources = case.stage, case.model, case.stage.resources
    devices = case.trainers(str(stage.precision))
    if steps is None or not devices.peak:
        return None
    each = 0.0 if asked is None else asked.seconds
    if each is None:
        return None
    tokens, peak, shares = steps * int(stage.batch_tokens), devices.peak, devices.shares
    held_out = case.sizes.held_out_tokens(stage.data, model.vocabulary, is_chat=stage.is_chat)
    validated = stage.validation_tokens if held_out is None else min(stage.validation_tokens, held_out)
    validations = (steps // stage.validation_every + 1) * validated
    scored_before = stage.passes_before * tokens / max(stage.passes, 1.0)
    worked = tokens * (4 / 3 if stage.activation_checkpointing else 1.0) + (validations + scored_before) / 3
    flops = float(model.training_flops(stage.sequence_length))
    if stage.precision == "fp8" and case.machine.multiplies_fp8(case.device):
        flops -= 6 * model.parameters["matrices"] / 2  # at twice the peak; the time of casts is not counted
    computing = worked * flops / (shares.training * peak)
    scored = _times(stage.core_every, steps) * core_tokens(stage.core_limit, model.vocabulary)
    scoring = scored * model.forward_flops(CORE_CONTEXT) / (shares.likelihood * peak)
    start = SPEEDS["start"][case.device] + case.sizes.in_memory(stage.data) / SPEEDS["parsed_bytes"]
    scoring += _times(stage.benchmarks_every, steps) * each
    packing = tokens * stage.sequence_parallel / (int(resources.num_ranks) * SPEEDS["packed_tokens"])
    return start + max(computing, packing) + scoring


def _times(every: int, steps: int) -> int:
    """Evaluations of a training, one at the end; none where `every` is 0."""
    return (steps - 1) // every + 1 if every else 0


def _candidates(case: Case[SupervisedStage]) -> Iterator[Changed]:
    """Smaller micro-batches that divide a step, from the largest on; then the same with checkpointing, then ZeRO 3."""
    stage, length = case.stage, case.stage.sequence_length
    groups = int(stage.resources.num_ranks) // stage.sequence_parallel
    rows = max(1, int(stage.batch_tokens) // (groups * length))
    smaller = [r * length for r in range(rows, 0, -1) if rows % r == 0 and r * length <= int(stage.micro_batch_tokens)]
    for changes in ({}, {"activation_checkpointing": True}, {"activation_checkpointing": True, "zero_stage": 3}):
        for micro in smaller:
            yield changed(stage, {"micro_batch_tokens": micro, **changes})


SUPERVISED = Formula(
    plan_supervised,
    too_large=lambda case: ("micro_batch_tokens", case.stage.micro_batch_tokens),
    candidates=_candidates,
)
