"""The plan of a whole pipeline on a machine."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from nanodag.config import Pipeline, order_of
from nanodag.config.kinds import find_kind
from nanodag.config.stage_base import StageBase
from nanodag.errors import ConfigError
from nanodag.errors.words import counted, size
from nanodag.host.machine import Machine
from nanodag.own_code.functions import function_at
from nanodag.plan.case import Case, Formula, case_of, device_room, host_room, memory_faults
from nanodag.plan.stage_plan import Fault, StagePlan


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A pipeline's stages, in their order. price_per_hour: of the whole machine, 0 where none was said. made: stages
    that the store has -> the run that made them; they take no time, nothing of them must fit. warnings: in words.
    lacking: faults of what the stages name, a line each."""

    preset: str
    machine: Machine
    stages: Sequence[StagePlan]
    price_per_hour: float = 0.0
    made: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    lacking: Sequence[str] = ()

    @property
    def faults(self) -> list[str]:
        """Faults of all stages, a line each."""
        to_make = [stage for stage in self.stages if stage.name not in self.made]
        return [*(fault.text(stage.name) for stage in to_make for fault in stage.faults), *self.lacking]

    @property
    def seconds(self) -> float | None:
        """Seconds of all stages in a row, those beside others left out; None where one of them is not known."""
        each = [stage.seconds for stage in self.stages if not stage.is_beside and stage.name not in self.made]
        return None if None in each else sum(seconds for seconds in each if seconds is not None)

    @property
    def disk_bytes(self) -> int:
        """Most bytes on disk at any time, as far as stages are known: checkpoints go when their stage has ended."""
        kept = list(accumulate((stage.kept_bytes for stage in self.stages), initial=0))
        most = (before + (stage.disk_bytes or 0) for before, stage in zip(kept, self.stages, strict=False))
        return max(most, default=0)

    def price_of(self, seconds: float | None) -> float | None:
        """Price of that many seconds on the machine."""
        return None if seconds is None else seconds / 3600 * self.price_per_hour

    def as_json(self) -> dict[str, Any]:
        machine = self.machine
        return {
            "preset": self.preset,
            "machine": str(machine),
            "device_room": device_room(machine),
            "host_room": host_room(machine),
            "stages": [{**stage.as_json(), "price": self.price_of(stage.seconds)} for stage in self.stages],
            "seconds": self.seconds,
            "price": self.price_of(self.seconds),
            "disk_bytes": self.disk_bytes,
            "made": dict(self.made),
            "faults": self.faults,
        }


def plan_of(pipeline: Pipeline, machine: Machine, *, stages: Collection[str] = (), price_per_hour: float = 0.0) -> Plan:
    """The plan of a resolved pipeline. stages: those that are to be run; all unless given."""
    plans = [
        _beside(pipeline, _planned(pipeline, case_of(pipeline, name, machine)), stages)
        for name in order_of(pipeline)
        if not stages or name in stages
    ]
    on_disk = _with_disk(pipeline, plans, machine)
    return Plan(preset=pipeline.preset, machine=machine, stages=on_disk, price_per_hour=price_per_hour)


def check_plan(pipeline: Pipeline, machine: Machine, *, stages: Collection[str] = ()) -> None:
    """Raise ConfigError with a line for each thing that would not fit the machine, or be void, but for the settings
    that the pipeline names as `unchecked`."""
    if faults := plan_of(pipeline, machine, stages=stages).faults:
        lines = [f"Preset {pipeline.preset!r} does not fit {machine}:", *faults]
        raise ConfigError("\n  ".join([*lines, "If a number is meant, say so with unchecked=[NAME]."]))


def _planned(pipeline: Pipeline, case: Case[StageBase]) -> StagePlan:
    formula: Formula = function_at(case.stage.plan_formula)
    case = formula.prepared(case)
    plan, pool = formula.plan(case), case.stage.resources.work_pool
    if pool != "none":
        return replace(plan, notes=(*plan.notes, f"runs in the work pool {pool}: not checked here"))
    faults = [*_gpus(plan, case.machine), *memory_faults(plan, case, formula)]
    if all(fault.mend for fault in faults):  # where no setting helps, another fault's mend would contradict that
        faults += formula.faults(plan, case)
    return replace(plan, faults=[f for f in faults if f"{case.name}.{f.setting}" not in pipeline.unchecked])


def _beside(pipeline: Pipeline, plan: StagePlan, stages: Collection[str]) -> StagePlan:
    """The plan of a stage that runs on a CPU, at a low priority, while another trains the same model on."""
    stage = pipeline.stages[plan.name]
    others = [other for name, other in pipeline.stages.items() if not stages or name in stages]
    is_beside = find_kind(stage.kind).is_beside and any(
        other.inputs.get("model") == stage.inputs.get("model", "")
        and find_kind(other.kind).trains
        and plan.device == other.resources.device == "cpu"
        for other in others
    )
    return replace(plan, is_beside=is_beside)


def _gpus(plan: StagePlan, machine: Machine) -> Sequence[Fault]:
    """More GPUs than there are, or one where there is none."""
    if plan.device == "cuda" and machine.gpu is None:
        mend = ("resources.device=cpu",)
        return [Fault(setting="resources.device", found="cuda", why="and the machine has no GPU", mend=mend)]
    if plan.num_gpus > machine.num_gpus:
        why = f"are wanted, and a node has {machine.num_gpus}"
        mend = (f"resources.num_ranks={machine.num_gpus * machine.nodes}",)
        return [Fault(setting="resources.num_ranks", found=counted(plan.num_gpus, "GPU"), why=why, mend=mend)]
    return []


def _with_disk(pipeline: Pipeline, plans: Sequence[StagePlan], machine: Machine) -> Sequence[StagePlan]:
    """The plans, and the fault of the first stage at which the disk is full."""
    kept = 0
    for number, plan in enumerate(plans):
        if kept + (plan.disk_bytes or 0) > machine.disk:
            full = replace(plan, faults=(*plan.faults, _disk_fault(pipeline, plan, kept, machine)))
            return [*plans[:number], full, *plans[number + 1 :]]
        kept += plan.kept_bytes
    return plans


def _disk_fault(pipeline: Pipeline, plan: StagePlan, kept: int, machine: Machine) -> Fault:
    """Fault of a stage that fills the disk, with the most checkpoints that fit. kept: bytes of the stages before."""
    stage = pipeline.stages[plan.name]
    keeps = int(getattr(stage, "keep_checkpoints", 1))
    used, setting = kept + (plan.disk_bytes or 0), "keep_checkpoints" if keeps > 1 else "store.url"
    kinds = "what stages before it leave" + f" and {keeps} checkpoints" * (keeps > 1)
    why = f"are used of the disk at {plan.name}, with {kinds}, and {size(machine.disk)} are free where the store lies"
    for fewer in range(keeps - 1, 0, -1):
        stages = {**pipeline.stages, plan.name: stage.model_copy(update={"keep_checkpoints": fewer})}
        changed = _planned(pipeline, case_of(pipeline.model_copy(update={"stages": stages}), plan.name, machine))
        if kept + (changed.disk_bytes or 0) <= machine.disk:
            return Fault(setting=setting, found=size(used), why=why, mend=(f"keep_checkpoints={fewer}",))
    why += f"; set store.url to a place with {size(used)}, or free {size(used - machine.disk)}"
    return Fault(setting=setting, found=size(used), why=why)
