"""What every stage has: inputs, seed, resources."""

from typing import Literal

from pydantic import Field, model_validator

from nanodag.config.section import Auto, Natural, Positive, Section, operational


class Resources(Section):
    """Where a stage runs. num_ranks: processes, one a GPU, on all nodes together; threads: CPU threads a process.
    nodes: machines, this one and others of cluster.hostfile. gpus_per_node: num_ranks by node, 0 for not said.
    work_pool: Prefect's, whose worker builds the stage; `none` for the machine of the run's flow.
    offload_optimizer: master weights and optimizer state stay in the host's memory, and are updated there (DeepSpeed's
    ZeRO-Offload); offload_param: weights at rest, too."""

    num_ranks: Positive | Auto = "auto"
    threads: Positive | Auto = "auto"
    device: Literal["cpu", "cuda"] | Auto = "auto"
    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(0, ge=0)
    work_pool: str = Field("none", pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.-]*$")
    offload_optimizer: Literal["none", "cpu"] = "none"
    offload_param: Literal["none", "cpu"] = "none"

    def check_offload(self, *, zero_stage: int, optimizer: str) -> None:
        """Raise ValueError for an offload that ZeRO's stage or the optimizer does not have."""
        if self.offload_optimizer != "none" and zero_stage == 0:
            raise ValueError("resources.offload_optimizer: cpu needs zero_stage 1, 2 or 3; found 0")
        if self.offload_optimizer != "none" and optimizer == "muon":
            raise ValueError(
                "resources.offload_optimizer: cpu with Muon would orthogonalise every matrix on the CPU; use "
                "optimizer.name: adamw"
            )
        if self.offload_param != "none" and (zero_stage != 3 or self.offload_optimizer == "none"):
            raise ValueError(
                f"resources.offload_param: cpu needs zero_stage 3 and offload_optimizer: cpu; found {zero_stage} and "
                f"{self.offload_optimizer}"
            )

    @model_validator(mode="after")
    def _ranks_fit_nodes(self) -> "Resources":
        if self.work_pool != "none" and self.device == "auto":
            raise ValueError(f"device auto is this machine's, not that of work_pool {self.work_pool}; say cpu or cuda")
        if self.gpus_per_node and self.device == "cpu":
            raise ValueError(f"gpus_per_node {self.gpus_per_node} means nothing on device cpu; set num_ranks")
        if self.num_ranks == "auto":
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
    """What every stage has. inputs: input name -> stage name. timeout_s: a stage that takes longer is ended."""

    inputs: dict[str, str] = operational({})
    seed: Natural | Auto = "auto"
    resources: Resources = operational(Resources())
    timeout_s: float = operational(7 * 24 * 3600.0, gt=0)
    tracking: tuple[Literal["tensorboard", "wandb"], ...] = operational(("tensorboard",))
