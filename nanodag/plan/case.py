"""A stage that is to be planned: its settings, model, machine and sizes of data; and whether its processes fit."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from nanodag.config import Pipeline
from nanodag.config.footprint import USABLE
from nanodag.config.model_size import ModelSize, began_at, extended
from nanodag.config.model_size import model_of as derived_model_of
from nanodag.config.pipeline import PlanConfig
from nanodag.config.rl_parts import RewardConfig
from nanodag.config.section import found_in
from nanodag.config.stage_base import StageBase
from nanodag.data.config import SourceConfig
from nanodag.errors import BadRequest, ConfigError, SourceError
from nanodag.errors.words import size
from nanodag.host.machine import Machine
from nanodag.model.architecture import read_checkpoint
from nanodag.model.folder_size import size_of
from nanodag.model.model_source import local_files
from nanodag.plan.host_memory import HOST_SHARE
from nanodag.plan.sizes import Sizes
from nanodag.plan.speeds import PlannedDevices
from nanodag.plan.stage_plan import Fault, StagePlan

S = TypeVar("S", bound=StageBase)


@dataclass(frozen=True, kw_only=True)
class Case(Generic[S]):
    """One stage on one machine. inputs: of the plan that nobody can know. trained: sources that the inputs were trained
    on. judges: reward models that it asks, of known size."""

    name: str
    stage: S
    machine: Machine
    known_model: ModelSize | None
    sizes: Sizes
    inputs: PlanConfig = field(default_factory=PlanConfig)
    trained: Sequence[SourceConfig] = ()
    judges: Sequence[tuple[RewardConfig, ModelSize]] = ()

    @property
    def device(self) -> str:
        return str(self.stage.resources.device)

    @property
    def model(self) -> ModelSize:
        """The model's size, of a stage that is planned because it is known."""
        assert self.known_model is not None
        return self.known_model

    def devices(self, precision: str, count: int, engine: str = "embedded", *, gpus_each: int = 1) -> PlannedDevices:
        """Devices of the stage: so many GPUs, or cores as far as the machine has them."""
        if self.device == "cpu":
            count = max(1, min(count, self.machine.cores * self.stage.resources.num_nodes))
        return PlannedDevices(
            machine=self.machine,
            device=self.device,
            precision=precision,
            count=count,
            engine=engine,
            gpus_each=gpus_each,
        )

    def trainers(self, precision: str) -> PlannedDevices:
        """Devices of its ranks: GPUs, or cores of all their threads."""
        resources = self.stage.resources
        threads = 1 if self.device == "cuda" else int(resources.threads)
        return self.devices(precision, int(resources.num_ranks) * threads)

    def plan(self, **numbers: object) -> StagePlan:
        return StagePlan(name=self.name, kind=self.stage.kind, device=self.device, **numbers)  # type: ignore[arg-type]


Changed = tuple[tuple[str, ...], Any]
"""A candidate: settings as they would be written, and the stage with them."""


@dataclass(frozen=True)
class Formula:
    """Formula of a kind's plan, which its config class names as `plan_formula`.

    plan: the plan of a case. faults: of that plan, beside a lack of memory. too_large: the setting that is named where
    a case does not fit, and its value. candidates: changes that may make it fit, tried in their order. prepared: the
    case that the others take.
    """

    plan: Callable[[Any], StagePlan]
    faults: Callable[[StagePlan, Any], Iterable[Fault]] = lambda plan, case: ()
    too_large: Callable[[Any], tuple[str, object]] = lambda case: ("resources.device", case.device)
    candidates: Callable[[Any], Iterable[Changed]] = lambda case: ()
    prepared: Callable[[Any], Case[Any]] = lambda case: case


def case_of(pipeline: Pipeline, name: str, machine: Machine) -> Case[StageBase]:
    """The case of a stage of a resolved pipeline."""
    stage, mirror = pipeline.stages[name], None if pipeline.mirror == "none" else Path(pipeline.mirror)
    asked = ((reward, _judge_of(pipeline, stage, reward, mirror)) for _, reward in found_in(stage, RewardConfig))
    before = [pipeline.stages[source] for source in stage.inputs.values()]
    return Case(
        name=name,
        stage=stage,
        machine=machine,
        known_model=_model_of(pipeline, name, mirror),
        sizes=Sizes(pipeline.plan.data, mirror),
        inputs=pipeline.plan,
        trained=[source for other in before for source in other.learned_sources],
        judges=[(reward, model) for reward, model in asked if model is not None],
    )


def _judge_of(pipeline: Pipeline, stage: StageBase, reward: RewardConfig, mirror: Path | None) -> ModelSize | None:
    """The reward model that a reward asks; None for another reward, and for a model of a type that is not known."""
    if reward.from_input:
        return _model_of(pipeline, stage.inputs[reward.from_input], mirror)
    try:
        folder = Path(reward.own("folder"))
        return size_of(folder, read_checkpoint(folder).architecture) if folder.name else None
    except BadRequest:
        return None


def _model_of(pipeline: Pipeline, name: str, mirror: Path | None) -> ModelSize | None:
    """The model of a stage, or of the one that it takes it from; None where that is not known, as of an import from
    the hub that nobody has named yet."""
    known, began = derived_model_of(pipeline, name), began_at(pipeline, name)
    if not (imported := pipeline.stages[began].known_model):
        return known
    try:
        files = local_files(imported, mirror)
    except (BadRequest, SourceError):  # the check beforehand says what is wrong with it
        return None
    if not files:
        return known
    try:
        folder = files[0].parent
        size = size_of(folder, read_checkpoint(folder, pipeline.stages[began].known_code).architecture)
        return extended(pipeline, name, size)
    except BadRequest as error:
        raise ConfigError(f"{began}.model={imported} cannot be taken: {error}") from error


def device_room(machine: Machine) -> int:
    """Bytes of a GPU that processes can fill."""
    return int(USABLE * machine.gpu.memory) if machine.gpu is not None else 0


def host_room(machine: Machine) -> int:
    """Bytes of a node's memory that processes can fill."""
    return int(HOST_SHARE * machine.memory)


def fits(plan: StagePlan, machine: Machine) -> bool:
    """True where all processes of a stage have room. Where the machine has no GPU, what one would hold is not judged:
    the lack is a fault of its own, and a stage of a work pool runs elsewhere."""
    fits_device = machine.gpu is None or plan.device_bytes <= device_room(machine)
    return fits_device and plan.most_host_bytes <= host_room(machine)


def changed(stage: S, updates: Mapping[str, object]) -> tuple[tuple[str, ...], S]:
    """The candidate with these values. updates: dotted name -> value."""
    written = []
    for name, value in updates.items():
        section, _, field_name = name.rpartition(".")
        owner = getattr(stage, section) if section else stage
        if getattr(owner, field_name) != value:
            written.append(f"{name}={str(value).lower()}")
            owner = owner.model_copy(update={field_name: value})
            stage = stage.model_copy(update={section: owner}) if section else owner
    return tuple(written), stage


def memory_faults(plan: StagePlan, case: Case[S], formula: Formula) -> Iterator[Fault]:
    """One fault where the stage does not fit, with the first of the candidates that fits, else none."""
    machine = case.machine
    if fits(plan, machine):
        return
    candidates = formula.candidates(case)
    fitting = (names for names, stage in candidates if fits(formula.plan(replace(case, stage=stage)), machine))
    mend = next(fitting, ())
    if machine.gpu is not None and plan.device_bytes > device_room(machine):
        what, room = f"{size(plan.device_bytes)} on a GPU", f"the {size(device_room(machine))} of a {machine.gpu.name}"
    else:
        what, room = f"{size(plan.most_host_bytes)} of memory", f"{size(host_room(machine))}"
    why = f"takes {what}, more than {room} that can be used"
    if not mend:
        why += "; nothing that was tried of this stage is enough: take a smaller model, or a larger machine"
    setting, value = formula.too_large(case)
    yield Fault(setting=setting, found=str(value), why=why, mend=mend)
