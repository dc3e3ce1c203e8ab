"""Resources that a cluster is asked for on behalf of a stage: by the job of a work pool, or by sbatch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanodag.config import Pipeline
from nanodag.host.machine import Machine
from nanodag.plan.make import plan_of

# Over what the processes are planned to take: a plan is right within a quarter, and /dev/shm and files that were just
# read count as memory too.
MEMORY_MARGIN = 1.5
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Needs of a stage on each of its nodes. memory: bytes of host memory, 0 where it is not known."""

    nodes: int
    gpus: int
    cpus: int
    memory: int

    def job_variables(self, template: Mapping[str, Any]) -> dict[str, Any]:
        """Variables of a work pool's base job template that say `gpus`, `cpus` and `memory`, filled in; what is
        not known is left to the pool."""
        values: dict[str, int | str] = {"gpus": self.gpus, "cpus": self.cpus}
        if self.memory:
            values["memory"] = f"{self._mebibytes}Mi"
        offered = template.get("variables", {}).get("properties", {})
        types = {name: offered.get(name, {}).get("type") for name in values}
        return {n: v for n, v in values.items() if types[n] == ("string" if isinstance(v, str) else "integer")}

    def sbatch_options(self) -> list[str]:
        """Options of Slurm's sbatch: one task on each node."""
        options = [f"--nodes={self.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={self.cpus}"]
        options += [f"--gpus-per-node={self.gpus}"] if self.gpus else []
        return options + ([f"--mem={self._mebibytes}M"] if self.memory else [])

    @property
    def _mebibytes(self) -> int:
        return math.ceil(self.memory / MIB)


def requests_of_run(pipeline: Pipeline, machine: Machine) -> Requests:
    """Needs of a whole resolved pipeline: all that the machine's nodes have, and memory for the two largest stages, as
    an evaluation runs beside the next stage."""
    largest = sorted(stage.host_bytes for stage in plan_of(pipeline, machine).stages)[-2:]
    memory = min(machine.memory, math.ceil(MEMORY_MARGIN * sum(largest)))
    return Requests(nodes=machine.nodes, gpus=machine.num_gpus, cpus=machine.cores, memory=memory)


def requests_of(pipeline: Pipeline, name: str, machine: Machine) -> Requests:
    """Needs of a stage of a resolved pipeline, on such a machine."""
    stage = pipeline.stages[name]
    resources, nodes = stage.resources, int(stage.resources.nodes)
    (plan,) = plan_of(pipeline, machine, stages=[name]).stages
    return Requests(
        nodes=nodes,
        gpus=stage.num_gpus(machine.num_gpus) if resources.device == "cuda" else 0,
        cpus=int(resources.num_ranks) // nodes * int(resources.threads),
        memory=math.ceil(MEMORY_MARGIN * plan.host_bytes),
    )
