"""What every stage has: inputs, seed, resources."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from nanodag.config.section import Auto, Natural, Positive, Section, StageSection, in_sections, operational
from nanodag.registry import optimizer_named


class Resources(StageSection):
    """Where a stage runs."""

    num_ranks: Positive | Auto = "auto"
    """Training processes on all nodes together, one for each GPU. `auto`: all GPUs, or cores, that a step of the stage
    has work for."""
    threads: Positive | Auto = "auto"
    """CPU threads of each process; `auto` shares out the cores."""
    device: Literal["cpu", "cuda"] | Auto = "auto"
    """The kind of device: `cpu` or `cuda`; `auto` takes the pipeline's `device`, and `cpu` for a stage that multiplies
    nothing."""
    nodes: Positive | Auto = "auto"
    """Machines that share the stage: this one and others of cluster.hostfile. `auto`: one, unless the pipeline is
    resolved for a machine of several nodes."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs on each node; num_ranks follows from it. 0 leaves it open."""
    work_pool: str = Field("none", pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.-]*$")
    """The Prefect work pool whose worker runs the stage; `none` runs it on the machine of the flow."""
    offload_optimizer: Literal["none", "cpu"] | Auto = "auto"
    """Where master weights and optimizer states stay and are updated: `none` for the device, `cpu` for host memory
    (DeepSpeed's ZeRO-Offload). `auto`: `cpu` where they would take more than half of a GPU's share, and the optimizer
    can be offloaded."""
    offload_param: Literal["none", "cpu"] = "none"
    """Where weights at rest stay: `none` for the device, `cpu` for host memory. It needs ZeRO stage 3 and
    offload_optimizer."""

    def check_offload(self, *, zero_stage: int, optimizer: str) -> None:
        """Raise ValueError for an offload that ZeRO's stage or the optimizer does not have."""
        is_offloaded = self.offload_optimizer == "cpu"
        if is_offloaded and zero_stage == 0:
            raise ValueError("resources.offload_optimizer: cpu needs zero_stage 1, 2 or 3; found 0")
        if is_offloaded and not optimizer_named(optimizer).offloads:
            raise ValueError(
                f"resources.offload_optimizer: cpu with {optimizer} would work on every matrix on the CPU; use "
                "optimizer.name: adamw"
            )
        if self.offload_param != "none" and (zero_stage != 3 or not is_offloaded):
            raise ValueError(
                f"resources.offload_param: cpu needs zero_stage 3 and offload_optimizer: cpu; found {zero_stage} and "
                f"{self.offload_optimizer}"
            )

    @property
    def num_nodes(self) -> int:
        """Nodes that share the stage; one where that is left to the machine."""
        return 1 if self.nodes == "auto" else self.nodes

    @model_validator(mode="after")
    def _ranks_fit_nodes(self) -> "Resources":
        if self.work_pool != "none" and self.device == "auto":
            raise ValueError(f"device auto is this machine's, not that of work_pool {self.work_pool}; say cpu or cuda")
        if self.gpus_per_node and self.device == "cpu":
            raise ValueError(f"gpus_per_node {self.gpus_per_node} means nothing on device cpu; set num_ranks")
        if self.num_ranks == "auto" or self.nodes == "auto":
            return self
        if self.num_ranks % self.nodes:
            raise ValueError(f"num_ranks {self.num_ranks} is not a multiple of nodes {self.nodes}; each has as many")
        if self.gpus_per_node not in (0, self.num_ranks // self.nodes):
            raise ValueError(
                f"num_ranks {self.num_ranks} is not nodes {self.nodes} x gpus_per_node {self.gpus_per_node}; leave one "
                "of them out"
            )
        return self


class StageBase(Section):
    """What every stage has."""

    kind: str
    inputs: dict[str, str] = operational({})
    """The stages that this one reads: input name -> stage name."""
    seed: Natural | Auto = "auto"
    """Seed of all random numbers of the stage; `auto` takes the pipeline's."""
    resources: Resources = operational(Resources())
    """Where the stage runs."""
    timeout_s: float = operational(7 * 24 * 3600.0, gt=0)
    """Seconds after which the stage is ended."""

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """A stage from settings by their short names, or in their sections."""
        return cls.model_validate(in_sections(cls, settings))

    def check_inputs(self) -> None:
        """Raise ValueError for inputs that do not fit the stage's other settings, where a kind has such."""
