"""Replaces every `auto` of a pipeline by a number and says why it is that number; and names what was set by hand and
the machine does badly, which is kept.

What a stage that trains gets from a machine is here: device, ranks, threads, precision, memory for micro-batches. Pure
functions of the pipeline and a Machine; RULES says each with its reason and numbers.

Numbers are coarse on purpose. A micro-batch is part of a stage's key, so machines of one kind must not differ in it:
memory counts in steps of half an octave, and micro-batches divide a step.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING, Any, TypeVar

from nanodag.config import footprint
from nanodag.config.kind import SCORES
from nanodag.config.kinds import find_kind
from nanodag.config.model_size import ModelSize, model_of
from nanodag.config.section import Filler, Part
from nanodag.config.stage_base import StageBase, TrainedStage
from nanodag.errors import ConfigError
from nanodag.errors.words import counted
from nanodag.host.beside import table_beside
from nanodag.host.machine import GIB, Machine
from nanodag.inference.number_formats import width_of

if TYPE_CHECKING:
    from nanodag.config.pipeline import Pipeline

BUNDLE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
ENDLESS = 1 << 60
NO_BUNDLE = "core_bundle is none"
CORE_LEFT_OUT = f"derived: {NO_BUNDLE}"  # origin of a setting from which CORE was left out
LEAST_FLOPS_A_RANK = {"cpu": 2e10, "cuda": 1e13}  # of a step
ROOM_IN_TURNS = 0.9  # of a GPU's room, for a trainer that samplers lend theirs: contexts and SGLang's graphs stay
PROCESS_BYTES = GIB
TRITON_CAPABILITY = 7.0


@dataclass(frozen=True)
class Rule:
    """Rule for an `auto`, as `nanodag config` says it, and its reason. setting: its name in a stage. limit: what the
    rule's text leaves room for, on a GPU."""

    setting: str
    rule: str
    reason: str
    limit: str = ""


_READ = table_beside(__file__, "rules.yaml")
NUMBERS: dict[str, int] = _READ.pop("numbers")
_SHOWN = {name: f"{number:,}" for name, number in NUMBERS.items()}
RULES = {
    name: Rule(**{field: Template(text).substitute(_SHOWN) for field, text in rule.items()})
    for name, rule in _READ.items()
}


def reason_of(origin: str) -> str:
    """Reason of the rule in a value's origin; empty where no rule is."""
    reasons = (rule.reason for rule in RULES.values() if rule.rule.partition("{")[0] in origin)
    return next(reasons, "") if origin.startswith("derived: ") else ""


S = TypeVar("S", bound=StageBase)
Trained = TypeVar("Trained", bound=TrainedStage)


class Derived:
    """Origins of values derived so far, for one stage of a pipeline, by dotted name."""

    def __init__(self, name: str, machine: Machine, origins: dict[str, str], pipeline: "Pipeline") -> None:
        self.name, self.machine, self.origins, self.pipeline = name, machine, origins, pipeline

    def why(self, rule: str, **values: Any) -> str:
        """The machine and a rule of RULES, from which a value follows. values: what the rule's text has room for."""
        return f"{self.machine.short}: {RULES[rule].rule.format(**values)}"

    def note(self, setting: str, rule: str) -> None:
        """Note that a setting of the stage follows from a rule."""
        self.origins[f"{self.name}.{setting}"] = f"derived: {self.why(rule)}"

    def filler(self, section: Part, place: str = "") -> Filler[Part]:
        """The filler of the stage, or of its section at a place."""
        return Filler(section, f"{self.name}.{place}" if place else self.name, self.origins)

    def fastest(self, stage: StageBase) -> str:
        """The precision that a stage's device multiplies fastest."""
        return "bf16" if self.machine.multiplies_bf16_fast(str(stage.resources.device)) else "fp32"


def budget(memory: int) -> int:
    """Bytes of a device that may be planned for: 90 % of it, down to a power of two or one and a half of one."""
    usable = int(0.9 * memory)
    power = 1 << (usable.bit_length() - 1)
    return power * 3 // 2 if usable >= power * 3 // 2 else power


def device_of(stage: S, of_pipeline: str, derived: Derived) -> S:
    """The stage on a device. of_pipeline: `cpu` or `cuda`. Raises ConfigError for GPUs of a stage on CPUs."""
    fill, gpus = derived.filler(stage.resources, "resources"), stage.resources.gpus_per_node
    is_on_cpu = find_kind(stage.kind).is_on_cpu or stage.is_served
    why = derived.why("device_cpu" if is_on_cpu else "device_stage")
    if fill("device", "cpu" if is_on_cpu else of_pipeline, why) == "cpu" and gpus:
        raise ConfigError(f"{derived.name}.resources.gpus_per_node: {gpus}, and this machine has no GPU.")
    return stage.model_copy(update={"resources": fill.filled})


def precision_of(stage: S, derived: Derived) -> S:
    """The stage in the precision that its device multiplies fastest; an evaluation on a CPU in float32."""
    if not hasattr(stage, "precision"):
        return stage
    fill, is_scored = derived.filler(stage), find_kind(stage.kind).makes == SCORES
    precision = "fp32" if is_scored and stage.resources.device == "cpu" else derived.fastest(stage)
    fill("precision", precision, derived.why("precision_evaluation" if is_scored else "precision"))
    return fill.filled


def spread(stage: S, model: ModelSize | None, derived: Derived) -> S:
    """The stage with nodes, ranks and threads, once its device, precision and batch are known."""
    machine, resources, trains = derived.machine, stage.resources, find_kind(stage.kind).trains
    nodes, ranks = resources.nodes, resources.num_ranks
    if ranks == "auto" and resources.gpus_per_node:
        nodes = 1 if nodes == "auto" else nodes
        ranks = nodes * resources.gpus_per_node
        derived.note("resources.num_ranks", "ranks_given")
    elif ranks == "auto":
        nodes, ranks = _nodes_and_ranks(stage, model, derived)
    elif nodes == "auto":
        most = _nodes_to_train_on(stage, machine)
        nodes = most if trains and ranks % most == 0 else 1
    fill = derived.filler(resources, "resources")
    fill("nodes", nodes, derived.why("nodes"))
    fill("threads", max(1, machine.cores * nodes // ranks), derived.why("threads"))
    fill.updates["num_ranks"] = ranks
    if resources.offload_optimizer == "auto" and not trains:
        fill.updates["offload_optimizer"] = "none"
    return stage.model_copy(update={"resources": fill.filled})


def _nodes_and_ranks(stage: StageBase, model: ModelSize | None, derived: Derived) -> tuple[int, int]:
    """Nodes and ranks: as many ranks, on all nodes together, as a step has work for, on as few nodes as have room for
    these."""
    machine, device, nodes = derived.machine, str(stage.resources.device), stage.resources.nodes
    if not find_kind(stage.kind).trains:
        derived.note("resources.num_ranks", "ranks_none")
        return (1, 1) if nodes == "auto" else (nodes, nodes)
    allowed = range(1, _nodes_to_train_on(stage, machine) + 1) if nodes == "auto" else range(nodes, nodes + 1)
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
            f"{derived.name}: sequence_parallel has {unit} ranks share each row, and this machine has {there} {what} "
            "for them; lower it."
        )
    totals = [(count * ranks, -count) for count in allowed for ranks in {*of_a_node, unit}]
    fitting = [(t, n) for t, n in totals if t <= most and t % unit == 0 and rows % t == 0]
    ranks, fewest = max(fitting, default=(allowed[0] * unit, -allowed[0]))
    return -fewest, ranks


def check_heads(stage_name: str, unit: int, model: ModelSize | None) -> None:
    """Raise ConfigError for a model whose heads unit ranks cannot share out; nothing is said of an unknown one."""
    if model is not None and (model.shape.num_heads % unit or model.shape.num_kv_heads % unit):
        heads = f"{model.shape.num_heads} query and {model.shape.num_kv_heads} key-value heads"
        raise ConfigError(f"{stage_name}.sequence_parallel: {unit} does not divide the model's {heads}.")


def _nodes_to_train_on(stage: StageBase, machine: Machine) -> int:
    """Nodes of a machine that are left to ranks, beside those that samplers have to themselves."""
    return max(1, machine.nodes - stage.machines.get("sampler.nodes", 0))


def offloaded(stage: Trained, model: ModelSize | None, can: bool, derived: Derived) -> Trained:
    """The stage with its optimizer's states in host memory where they are large and can be there."""
    is_large = False
    if can and stage.resources.device == "cuda" and model is not None and derived.machine.gpu is not None:
        is_large = 2 * state_bytes(stage, model, int(stage.resources.num_ranks)) > rank_room(stage, derived.machine, 1)
    fill = derived.filler(stage.resources, "resources")
    fill("offload_optimizer", "cpu" if is_large else "none", derived.why("offload"))
    return stage.model_copy(update={"resources": fill.filled})


def fitting_tokens(stage: TrainedStage, model: ModelSize | None, derived: Derived, *, checkpointed: bool) -> int:
    """Tokens of a micro-batch that fit on one rank's device; as many as one likes where nobody knows."""
    resources = stage.resources
    if model is None or (resources.device == "cuda" and derived.machine.gpu is None):
        return ENDLESS
    ranks = int(resources.num_ranks)
    left = free_bytes(stage, model, derived.machine, ranks, ranks // resources.num_nodes)
    return max(0, left) // token_bytes(stage, model, checkpointed=checkpointed)


def rank_room(stage: TrainedStage, machine: Machine, ranks_here: int) -> int:
    """Bytes that a rank may fill: of its GPU, or its share of the host's memory; in RL what samplers leave of it."""
    if stage.resources.device == "cuda" and machine.gpu is not None:
        return int(stage.room_share * (budget(machine.gpu.memory) - footprint.CUDA_BYTES))
    return int(stage.room_share * (budget(machine.memory) // ranks_here - PROCESS_BYTES))


def state_of(stage: TrainedStage, model: ModelSize, *, num_ranks: int, is_critic: bool = False) -> footprint.TrainState:
    """Memory of a rank for the model that a stage trains, or for its critic, which has no adapters."""
    rank, matrix_bytes = 0 if is_critic else stage.lora_rank, 0.0
    if rank and stage.lora_base == "nf4" and model.active_mlp_width is None:  # experts in one tensor stay whole
        kept = 0 if stage.trainer.activation_checkpointing is True else width_of(stage.trainer.precision)
        matrix_bytes = footprint.FOUR_BITS + kept  # each layer's whole matrices, for the backward pass
    return footprint.train_state(
        model.parameters,
        precision=stage.trainer.precision,
        zero_stage=stage.trainer.zero_stage,
        num_ranks=num_ranks,
        optimizer=stage.optimizer_name,
        device=str(stage.resources.device),
        offload_optimizer=stage.resources.offload_optimizer == "cpu",
        offload_param=stage.resources.offload_param == "cpu",
        trained=footprint.lora_parameters(model.shape, rank) if rank else None,
        matrix_bytes=matrix_bytes,
    )


def state_bytes(stage: TrainedStage, model: ModelSize, ranks: int) -> int:
    """Bytes of all weights, gradients and states on one rank's device, of every model that the stage holds."""
    trained, frozen = stage.held_models
    total = state_of(stage, model, num_ranks=ranks).total
    whole = width_of(stage.trainer.precision) * model.total
    return total * trained + frozen * whole // (ranks if stage.trainer.zero_stage == 3 else 1)


def free_bytes(stage: TrainedStage, model: ModelSize, machine: Machine, ranks: int, ranks_here: int) -> int:
    """Bytes that a rank has for micro-batches, beside states and the head's logits. ranks_here: on its node."""
    precision, device = stage.trainer.precision, str(stage.resources.device)
    tokens, scored = NUMBERS[f"full_tokens_{device}"], stage.scores_tokens
    head = footprint.head_memory(
        model.shape, model.vocabulary, tokens, precision=precision, device=device, scored=scored
    )
    return rank_room(stage, machine, ranks_here) - state_bytes(stage, model, ranks) - head


def token_bytes(
    stage: TrainedStage, model: ModelSize, tokens: int = 1, *, checkpointed: bool, kept_share: float = 1.0
) -> int:
    """Bytes that so many tokens of a micro-batch take. kept_share: of the activations, that layers keep."""
    device, precision, shape = str(stage.resources.device), stage.trainer.precision, model.shape
    kept = int(kept_share * footprint.activations(shape, tokens, precision=precision, checkpointing=checkpointed))
    kept += footprint.working(shape, tokens, precision)
    if stage.packs_documents:
        kept += footprint.documents_apart(shape, tokens, precision=precision, device=device, checkpointing=checkpointed)
    return kept


def has_compiler(device: str, machine: Machine) -> bool:
    """True where layers can be compiled for a machine's device."""
    return device == "cpu" or machine.gpu is None or machine.gpu.capability >= TRITON_CAPABILITY


def derive(pipeline: "Pipeline", machine: Machine) -> tuple["Pipeline", dict[str, str]]:
    """The pipeline without `auto`, as it fits a machine, and the origin of what was filled in, by dotted name."""
    origins: dict[str, str] = {}
    device = pipeline.device
    if device == "auto":
        device = machine.device
        origins["device"] = f"derived: {machine.short}: {RULES['device'].rule}"
    stages: dict[str, Any] = {}
    for name, stage in pipeline.stages.items():
        derived = Derived(name, machine, origins, pipeline)
        fill = derived.filler(stage)
        fill("seed", pipeline.seed, "the pipeline's seed")
        stage = precision_of(device_of(fill.filled, device, derived).before_ranks(derived), derived)
        model = model_of(pipeline, name)
        stages[name] = spread(stage, model, derived).after_ranks(model, derived)
    return pipeline.model_copy(update={"stages": stages, "device": device}), origins


def core_left_out(origins: Mapping[str, str]) -> tuple[str, ...]:
    """The warning that CORE is left out of stages; none where it is of none. origins: of what was derived."""
    without = dict.fromkeys(name.partition(".")[0] for name, why in origins.items() if why == CORE_LEFT_OUT)
    warning = f"CORE is left out of {', '.join(without)}: {NO_BUNDLE}. Set core_bundle, or "
    warning += f"NANODAG_CORE_BUNDLE, to {BUNDLE} or a folder with its files"
    return (warning,) if without else ()


def unwise(pipeline: "Pipeline", machine: Machine, given: Collection[str]) -> tuple[str, ...]:
    """A line for each bad idea, naming the settings, what is bad, and what `auto` would say.

    pipeline: derived for the machine. given: dotted names of what somebody wrote.
    """
    settings: dict[str, list[str]] = {}
    for name, stage in pipeline.stages.items():
        if stage.resources.work_pool != "none":  # another machine's
            continue
        for setting, why in _of_stage(stage, machine):
            if f"{name}.{setting}" in given:
                settings.setdefault(why, []).append(f"{name}.{setting}")
    return tuple(f"{', '.join(names)}: {why}" for why, names in settings.items())


def _of_stage(stage: StageBase, machine: Machine) -> Iterator[tuple[str, str]]:
    resources = stage.resources
    device = str(resources.device)
    is_fast = machine.multiplies_bf16_fast(device)
    for setting in ("precision", "optimizer.precision", "sampler.precision"):
        section = stage if setting == "precision" else getattr(stage, setting.partition(".")[0], None)
        precision = getattr(section, "precision", None)
        if precision == "bf16" and not is_fast:
            yield setting, f"bf16, which {machine.short} emulates many times slower than fp32; `auto` is fp32"
        if precision == "fp8" and not machine.multiplies_fp8(device):
            yield setting, f"fp8, which {machine.short} emulates, so it is slower than `auto`"
        if precision == "fp32" and device == "cuda" and is_fast and find_kind(stage.kind).trains:
            yield setting, f"fp32, which {machine.short} multiplies many times slower than bf16; `auto` is bf16"
    ranks, threads = int(resources.num_ranks) // resources.num_nodes, int(resources.threads)
    if device == "cuda" and machine.gpu is not None and ranks > machine.num_gpus:
        why = f"{counted(ranks, 'rank')} a node, and {machine.short} has {counted(machine.num_gpus, 'GPU')} for them"
        yield "resources.num_ranks", why
    if device == "cpu" and ranks * threads > machine.cores:
        why = f"{counted(ranks, 'rank')} of {counted(threads, 'thread')} take turns on {counted(machine.cores, 'core')}"
        for name in ("num_ranks", "threads"):
            yield f"resources.{name}", f"{why}; `auto` uses each core once"
