"""Settings of a stage that trains which follow from a machine: device, ranks, threads, precision, micro-batch and what
goes with them. Pure functions of the pipeline and a Machine; nanodag.config.hardware_rules says each with its reason.

Numbers are coarse on purpose. A micro-batch is part of a stage's key, so machines of one kind must not differ in it:
memory counts in steps of half an octave, and micro-batches divide a step.
"""

from typing import TYPE_CHECKING, Any, TypeVar

from nanodag.config.derive_sampler import SHARE_BESIDE_TRAINER
from nanodag.config.footprint import (
    CUDA_BYTES,
    TrainState,
    activations,
    documents_apart,
    head_memory,
    lora_parameters,
    train_state,
    working,
)
from nanodag.config.hardware_rules import (
    FULL_TOKENS,
    LEAST_BF16_WIDTH,
    LEAST_FLOPS_A_RANK,
    LEAST_TOKENS,
    MAX_CPU_RANKS,
    PROCESS_BYTES,
    RL_CORES_A_RANK,
    RL_TOKENS,
    RL_TOKENS_UNKNOWN,
    RULES,
    TRITON_CAPABILITY,
)
from nanodag.config.kind import SCORES
from nanodag.config.kinds import find_kind
from nanodag.config.model_size import ModelSize
from nanodag.config.stage_base import StageBase, TrainedStage
from nanodag.errors import ConfigError
from nanodag.host.machine import Machine
from nanodag.inference.number_formats import width_of

if TYPE_CHECKING:
    from nanodag.config.kinds.rl import RLStage
    from nanodag.config.pipeline import Pipeline
    from nanodag.config.supervised import SupervisedStage

ENDLESS = 1 << 60

_S = TypeVar("_S", bound=StageBase)
_Trained = TypeVar("_Trained", bound=TrainedStage)
_RL = TypeVar("_RL", bound="RLStage")
_Supervised = TypeVar("_Supervised", bound="SupervisedStage")


class Derived:
    """Origins of values derived so far, for one stage of a pipeline: `note` keeps the origin of a value by its dotted
    name."""

    def __init__(self, name: str, machine: Machine, origins: dict[str, str], pipeline: "Pipeline") -> None:
        self.name, self.machine, self.origins, self.pipeline = name, machine, origins, pipeline

    def note(self, setting: str, rule: str, **values: Any) -> None:
        """Note that a setting of the stage follows from a rule of RULES. values: what its text has room for."""
        self.origins[f"{self.name}.{setting}"] = f"derived: {self.machine.short}: {RULES[rule].rule.format(**values)}"


def budget(memory: int) -> int:
    """Bytes of a device that may be planned for: 90 % of it, down to a power of two or one and a half of one."""
    usable = int(0.9 * memory)
    power = 1 << (usable.bit_length() - 1)
    return power * 3 // 2 if usable >= power * 3 // 2 else power


def device_of(stage: _S, of_pipeline: str, derived: Derived) -> _S:
    """The stage on a device. of_pipeline: `cpu` or `cuda`. Raises ConfigError for GPUs of a stage on CPUs."""
    resources = stage.resources
    device = resources.device
    if device == "auto":
        is_on_cpu = find_kind(stage.kind).is_on_cpu
        device = "cpu" if is_on_cpu else of_pipeline  # type: ignore[assignment]
        derived.note("resources.device", "device_cpu" if is_on_cpu else "device_stage")
    if resources.gpus_per_node and device == "cpu":
        raise ConfigError(
            f"{derived.name}.resources.gpus_per_node: {resources.gpus_per_node}, and this machine has no GPU."
        )
    return stage.model_copy(update={"resources": resources.model_copy(update={"device": device})})


def precision_of(stage: _S, derived: Derived) -> _S:
    """The stage in the precision that its device multiplies fastest; an evaluation on a CPU in float32."""
    if getattr(stage, "precision", "") != "auto":
        return stage
    is_scored = find_kind(stage.kind).makes == SCORES
    derived.note("precision", "precision_evaluation" if is_scored else "precision")
    precision = "fp32" if is_scored and stage.resources.device == "cpu" else _fastest(stage, derived)
    return stage.model_copy(update={"precision": precision})


def rl_precision(stage: _RL, model: ModelSize | None, derived: Derived) -> _RL:
    """RL's trainer in the fastest precision; narrow models on a CPU in float32."""
    if stage.optimizer.precision != "auto":
        return stage
    is_narrow = stage.resources.device == "cpu" and model is not None and model.shape.width < LEAST_BF16_WIDTH
    derived.note("optimizer.precision", "precision_rl" if is_narrow else "precision")
    precision = "fp32" if is_narrow else _fastest(stage, derived)
    return stage.model_copy(update={"optimizer": stage.optimizer.model_copy(update={"precision": precision})})


def _fastest(stage: StageBase, derived: Derived) -> str:
    return "bf16" if derived.machine.multiplies_bf16_fast(str(stage.resources.device)) else "fp32"


def own_gpus(stage: _RL, derived: Derived) -> _RL:
    """The stage with the GPUs that samplers have to themselves, by number. Raises ConfigError where that leaves the
    trainer none, or one is not there."""
    gpus, total = stage.sampler.gpus, derived.machine.num_gpus
    is_separate = stage.placement == "separate" and stage.resources.device == "cuda" and not stage.sampler.nodes
    if gpus == "auto":
        derived.note("sampler.gpus", "sampler_gpus")
        gpus = max(1, total // 2) if is_separate else ()
    numbers = tuple(range(total - gpus, total)) if isinstance(gpus, int) else gpus
    if is_separate and (not numbers or len(set(numbers)) != len(numbers) or not set(numbers) < set(range(total))):
        raise ConfigError(
            f"{derived.name}.sampler.gpus: {stage.sampler.gpus} of this machine's {total} leaves samplers or trainer "
            f"without a GPU of its own; name some of {', '.join(map(str, range(total))) or 'none'}, not all."
        )
    return stage.model_copy(update={"sampler": stage.sampler.model_copy(update={"gpus": numbers})})


def placed(stage: _RL, model: ModelSize | None, derived: Derived) -> _RL:
    """The stage with its placement, once its ranks are known."""
    updates: dict[str, Any] = {}
    if stage.placement == "auto":
        updates["placement"] = placement = "shared" if _gains_by_turns(stage, model, derived.machine) else "beside"
        derived.note("placement", f"placement_{placement}")
    if stage.lends_states == "auto":
        is_lent = updates.get("placement", stage.placement) == "shared" and stage.resources.device == "cuda"
        updates["lends_states"] = is_lent
        derived.note("lends_states", "lends_states")
    return stage.model_copy(update=updates)


def _gains_by_turns(stage: "RLStage", model: ModelSize | None, machine: Machine) -> bool:
    """True where the optimizer's states stay on the GPU where the trainer has it in turns, and beside samplers not."""
    sampler = stage.sampler
    if model is None or machine.gpu is None or stage.resources.device != "cuda":
        return False
    if stage.resources.offload_optimizer != "auto" or sampler.nodes or sampler.gpus != () or sampler.has_others:
        return False
    if stage.rollout.max_staleness or stage.lends_states is False:
        return False
    states = 2 * _states(stage, model, int(stage.resources.num_ranks))
    share = SHARE_BESIDE_TRAINER if sampler.memory_fraction == "auto" else sampler.memory_fraction
    sampler = sampler.model_copy(update={"memory_fraction": share})
    placements = ("beside", "shared")
    beside, shared = (stage.model_copy(update={"placement": each, "sampler": sampler}) for each in placements)
    return _room(beside, machine, 1) < states <= _room(shared, machine, 1)


def spread(stage: _S, model: ModelSize | None, derived: Derived) -> _S:
    """The stage with nodes, ranks and threads, once its device, precision and batch are known."""
    machine, resources = derived.machine, stage.resources
    nodes, ranks = resources.nodes, resources.num_ranks
    if ranks == "auto" and resources.gpus_per_node:
        nodes = 1 if nodes == "auto" else nodes
        ranks = nodes * resources.gpus_per_node
        derived.note("resources.num_ranks", "ranks_given")
    elif ranks == "auto":
        nodes, ranks = _nodes_and_ranks(stage, model, derived)
    elif nodes == "auto":
        nodes = machine.nodes if find_kind(stage.kind).trains and ranks % machine.nodes == 0 else 1
    updates: dict[str, Any] = {"nodes": nodes, "num_ranks": ranks}
    if resources.nodes == "auto":
        derived.note("resources.nodes", "nodes")
    if resources.threads == "auto":
        updates["threads"] = max(1, machine.cores * nodes // ranks)
        derived.note("resources.threads", "threads")
    if resources.offload_optimizer == "auto" and not find_kind(stage.kind).trains:
        updates["offload_optimizer"] = "none"
    return stage.model_copy(update={"resources": resources.model_copy(update=updates)})


def _nodes_and_ranks(stage: StageBase, model: ModelSize | None, derived: Derived) -> tuple[int, int]:
    """Nodes and ranks: as many ranks, on all nodes together, as a step has work for, on as few nodes as have room for
    these."""
    machine, device, nodes = derived.machine, str(stage.resources.device), stage.resources.nodes
    if not find_kind(stage.kind).trains:
        derived.note("resources.num_ranks", "ranks_none")
        return (1, 1) if nodes == "auto" else (nodes, nodes)
    allowed = range(1, machine.nodes + 1) if nodes == "auto" else range(nodes, nodes + 1)
    if device == "cuda":
        of_a_node = list(range(1, max(1, machine.num_gpus - stage.own_gpus) + 1))
        derived.note("resources.num_ranks", "ranks_cuda")
    else:
        of_a_node = stage.ranks_on_cpu(model, derived)
    tokens, length, rows, unit = stage.step_size
    most = allowed[-1] * of_a_node[-1]
    if model is not None:
        most = min(most, int(tokens * model.training_flops(length) / LEAST_FLOPS_A_RANK[device]))
    most = max(most, unit, allowed[0])
    if unit > (there := allowed[-1] * (machine.num_gpus if device == "cuda" else machine.cores)):
        what = "GPUs" if device == "cuda" else "cores"
        raise ConfigError(
            f"{derived.name}.optimizer.sequence_parallel: {unit} ranks would share each row, and this machine has "
            f"{there} {what} for them; lower it."
        )
    totals = [(count * ranks, -count) for count in allowed for ranks in {*of_a_node, unit}]
    fitting = [(t, n) for t, n in totals if t <= most and t % unit == 0 and rows % t == 0]
    ranks, fewest = max(fitting, default=(allowed[0] * unit, -allowed[0]))
    return -fewest, ranks


def rl_ranks_on_cpu(derived: Derived) -> list[int]:
    """Numbers of ranks of RL that a node may have beside its samplers, ascending."""
    derived.note("resources.num_ranks", "ranks_rl_cpu")
    return list(range(1, max(1, min(MAX_CPU_RANKS, derived.machine.cores // RL_CORES_A_RANK)) + 1))


def supervised_ranks_on_cpu(stage: "SupervisedStage", model: ModelSize, derived: Derived) -> list[int]:
    """Numbers of ranks with which few cores are idle and memory holds a row of each, ascending."""
    machine = derived.machine
    derived.note("resources.num_ranks", "ranks_cpu")

    def fits(ranks: int) -> bool:
        used = ranks * (machine.cores // ranks)
        room = _room(stage, machine, ranks) - _fixed(stage, model, ranks)
        return 4 * used >= 3 * machine.cores and room > stage.sequence_length * _of_token(
            stage, model, checkpointed=False
        )

    return [1, *filter(fits, range(2, min(MAX_CPU_RANKS, machine.cores) + 1))]


def fit_supervised(stage: _Supervised, model: ModelSize | None, derived: Derived) -> _Supervised:
    """The stage with offload, activation checkpointing, micro-batch and compilation, once its ranks are known."""
    device, ranks = str(stage.resources.device), int(stage.resources.num_ranks)
    if stage.resources.offload_optimizer == "auto":
        can = stage.optimizer.traits.offloads and stage.zero_stage > 0
        stage = _offload(stage, model, can, derived)
    of_rank = max(1, int(stage.batch_tokens) // ranks)
    limit = FULL_TOKENS[device]
    updates: dict[str, Any] = {}
    if device == "cuda" and (model is None or derived.machine.gpu is None):
        limit = LEAST_TOKENS
    if stage.activation_checkpointing == "auto":
        tokens = 0 if stage.micro_batch_tokens == "auto" else int(stage.micro_batch_tokens)
        least = tokens or min(LEAST_TOKENS if device == "cuda" else stage.sequence_length, of_rank)
        updates["activation_checkpointing"] = _tokens(stage, model, derived, checkpointed=False) < least
        derived.note("activation_checkpointing", "checkpointing")
    stage = stage.model_copy(update=updates)
    updates = {}
    if stage.micro_batch_tokens == "auto":
        room = _tokens(stage, model, derived, checkpointed=bool(stage.activation_checkpointing))
        updates["micro_batch_tokens"] = _dividing(of_rank, stage.sequence_length, min(limit, room))
        derived.note("micro_batch_tokens", "micro", limit=f"{limit:,}")
    if stage.compile == "auto":
        updates["compile"] = _has_compiler(device, derived.machine)
        derived.note("compile", "compile")
    return stage.model_copy(update=updates)


def fit_rl(stage: _RL, model: ModelSize | None, derived: Derived) -> _RL:
    """The trainer with offload, activation checkpointing, micro-batch and compilation, once its ranks are known."""
    device, context = str(stage.resources.device), int(stage.sampler.context)
    if stage.resources.offload_optimizer == "auto":
        stage = _offload(stage, model, True, derived)
    updates: dict[str, Any] = {}
    optimizer, limit = stage.optimizer, RL_TOKENS[device]
    if optimizer.activation_checkpointing == "auto":
        least = min(LEAST_TOKENS, limit) if device == "cuda" else context
        tokens = least if optimizer.micro_batch_tokens == "auto" else int(optimizer.micro_batch_tokens)
        room = _tokens(stage, model, derived, checkpointed=False)
        updates["activation_checkpointing"] = room < max(tokens, context)
        derived.note("optimizer.activation_checkpointing", "checkpointing")
    if optimizer.micro_batch_tokens == "auto":
        checkpointed = bool(updates.get("activation_checkpointing", optimizer.activation_checkpointing))
        room = min(limit, _tokens(stage, model, derived, checkpointed=checkpointed))
        is_unknown = device == "cuda" and (model is None or derived.machine.gpu is None)
        most = RL_TOKENS_UNKNOWN if is_unknown else 1 << (max(room, 1).bit_length() - 1)
        updates["micro_batch_tokens"] = max(most, context)
        derived.note(
            "optimizer.micro_batch_tokens", "micro_rl_unknown" if is_unknown else "micro_rl", limit=f"{limit:,}"
        )
    if optimizer.compile == "auto":
        is_fast = device == "cuda" or optimizer.precision == "bf16"
        updates["compile"] = is_fast and _has_compiler(device, derived.machine)
        derived.note("optimizer.compile", "compile_rl")
    return stage.model_copy(update={"optimizer": optimizer.model_copy(update=updates)})


def _offload(stage: _Trained, model: ModelSize | None, can: bool, derived: Derived) -> _Trained:
    is_large = False
    if can and stage.resources.device == "cuda" and model is not None and derived.machine.gpu is not None:
        is_large = 2 * _states(stage, model, int(stage.resources.num_ranks)) > _room(stage, derived.machine, 1)
    derived.note("resources.offload_optimizer", "offload")
    update = {"offload_optimizer": "cpu" if is_large else "none"}
    return stage.model_copy(update={"resources": stage.resources.model_copy(update=update)})


def _tokens(stage: TrainedStage, model: ModelSize | None, derived: Derived, *, checkpointed: bool) -> int:
    """Tokens of a micro-batch that fit on one rank's device; as many as one likes where nobody knows."""
    resources = stage.resources
    if model is None or (resources.device == "cuda" and derived.machine.gpu is None):
        return ENDLESS
    ranks = int(resources.num_ranks)
    room = _room(stage, derived.machine, ranks // resources.num_nodes) - _fixed(stage, model, ranks)
    return max(0, room) // _of_token(stage, model, checkpointed=checkpointed)


def _room(stage: TrainedStage, machine: Machine, ranks_here: int) -> int:
    """Bytes that a rank may fill: of its GPU, or its share of the host's memory; in RL what samplers leave of it."""
    device = str(stage.resources.device)
    if device == "cuda" and machine.gpu is not None:
        room = budget(machine.gpu.memory) - CUDA_BYTES
    else:
        room = budget(machine.memory) // ranks_here - PROCESS_BYTES
    return int(stage.room_share * room)


def state_of(stage: TrainedStage, model: ModelSize, *, num_ranks: int, is_critic: bool = False) -> TrainState:
    """Memory of a rank for the model that a stage trains, or for its critic, which has no adapters."""
    rank = 0 if is_critic else stage.lora_rank
    return train_state(
        model.parameters,
        precision=stage.trainer.precision,
        zero_stage=stage.trainer.zero_stage,
        num_ranks=num_ranks,
        optimizer=stage.optimizer_name,
        device=str(stage.resources.device),
        offload_optimizer=stage.resources.offload_optimizer == "cpu",
        offload_param=stage.resources.offload_param == "cpu",
        trained=lora_parameters(model.shape, rank) if rank else None,
    )


def _states(stage: TrainedStage, model: ModelSize, ranks: int) -> int:
    """Bytes of all weights, gradients and states on one rank's device, of every model that the stage holds."""
    trained, frozen = stage.held_models
    total = state_of(stage, model, num_ranks=ranks).total
    return total * trained + frozen * width_of(stage.trainer.precision) * model.total


def _fixed(stage: TrainedStage, model: ModelSize, ranks: int) -> int:
    """Bytes on one rank's device whatever its micro-batch is: states, and the head's blocks of logits."""
    device = str(stage.resources.device)
    head = head_memory(
        model.shape,
        model.vocabulary,
        FULL_TOKENS[device],
        precision=stage.trainer.precision,
        device=device,
        scored=stage.scores_tokens,
    )
    return _states(stage, model, ranks) + head


def _of_token(stage: TrainedStage, model: ModelSize, *, checkpointed: bool) -> int:
    """Bytes that each token of a micro-batch takes."""
    device, precision, shape = str(stage.resources.device), stage.trainer.precision, model.shape
    kept = activations(shape, 1, precision=precision, checkpointing=checkpointed) + working(shape, 1, precision)
    if not stage.packs_documents:
        return kept
    return kept + documents_apart(shape, 1, precision=precision, device=device, checkpointing=checkpointed)


def _dividing(of_rank: int, sequence_length: int, limit: int) -> int:
    """The largest whole number of rows, at most `limit` tokens, that divides a rank's share of a step."""
    rows = max(1, of_rank // sequence_length)
    most = min(rows, max(1, limit // sequence_length))
    return next(r for r in range(most, 0, -1) if rows % r == 0) * sequence_length


def _has_compiler(device: str, machine: Machine) -> bool:
    return device == "cpu" or machine.gpu is None or machine.gpu.capability >= TRITON_CAPABILITY
