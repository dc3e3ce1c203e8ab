"""Whether a stage's processes fit a machine, and which change of a setting makes them fit."""

from collections.abc import Callable, Iterable

from nanodag.config.footprint import USABLE
from nanodag.config.stage_base import StageBase
from nanodag.errors.words import size
from nanodag.host.machine import Machine
from nanodag.plan.processes import HOST_SHARE
from nanodag.plan.stage_plan import Fault, StagePlan

Candidate = tuple[tuple[str, ...], StageBase]
"""Settings as they would be written, and the stage with them."""


def device_room(machine: Machine) -> int:
    """Bytes of a GPU that processes can fill."""
    return int(USABLE * machine.gpu.memory) if machine.gpu is not None else 0


def host_room(machine: Machine) -> int:
    """Bytes of a node's memory that processes can fill."""
    return int(HOST_SHARE * machine.memory)


def fits(plan: StagePlan, machine: Machine) -> bool:
    """Whether all processes of a stage have room. Where the machine has no GPU, what one would hold is not judged: the
    lack is a fault of its own, and a stage of a work pool runs elsewhere."""
    fits_device = machine.gpu is None or plan.device_bytes <= device_room(machine)
    return fits_device and plan.most_host_bytes <= host_room(machine)


def memory_faults(
    plan: StagePlan,
    machine: Machine,
    *,
    setting: str,
    found: object,
    candidates: Iterable[Candidate],
    rebuilt: Callable[[StageBase], StagePlan],
) -> list[Fault]:
    """None where the stage fits; else one fault, with the first of the candidates that fits. setting, found: what is
    named as too large. rebuilt: the plan of a changed stage."""
    if fits(plan, machine):
        return []
    mend = next((settings for settings, stage in candidates if fits(rebuilt(stage), machine)), ())
    if machine.gpu is not None and plan.device_bytes > device_room(machine):
        what, room = f"{size(plan.device_bytes)} on a GPU", f"the {size(device_room(machine))} of a {machine.gpu.name}"
    else:
        what, room = f"{size(plan.most_host_bytes)} of memory", f"{size(host_room(machine))}"
    why = f"takes {what}, more than {room} that can be used"
    if not mend:
        why += "; nothing that was tried of this stage is enough: take a smaller model, or a larger machine"
    return [Fault(setting=setting, found=str(found), why=why, mend=mend)]
