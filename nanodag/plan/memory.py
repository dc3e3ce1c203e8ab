"""Fit of a stage's processes to a machine, and changes of settings that make them fit."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from nanodag.config.footprint import USABLE
from nanodag.errors.words import size
from nanodag.host.machine import Machine
from nanodag.plan.case import Case, S
from nanodag.plan.host_memory import HOST_SHARE
from nanodag.plan.stage_plan import Fault, StagePlan


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


def memory_faults(
    plan: StagePlan,
    case: Case[S],
    planned: Callable[[Case[S]], StagePlan],
    *,
    setting: str,
    value: object,
    candidates: Iterable[tuple[tuple[str, ...], S]] = (),
) -> list[Fault]:
    """One fault where the stage does not fit, with the first of the candidates that fits, else none.

    setting, value: named as too large. candidates: settings as they would be written, and the stage with them."""
    machine = case.machine
    if fits(plan, machine):
        return []
    fitting = (names for names, stage in candidates if fits(planned(replace(case, stage=stage)), machine))
    mend = next(fitting, ())
    if machine.gpu is not None and plan.device_bytes > device_room(machine):
        what, room = f"{size(plan.device_bytes)} on a GPU", f"the {size(device_room(machine))} of a {machine.gpu.name}"
    else:
        what, room = f"{size(plan.most_host_bytes)} of memory", f"{size(host_room(machine))}"
    why = f"takes {what}, more than {room} that can be used"
    if not mend:
        why += "; nothing that was tried of this stage is enough: take a smaller model, or a larger machine"
    return [Fault(setting=setting, found=str(value), why=why, mend=mend)]
