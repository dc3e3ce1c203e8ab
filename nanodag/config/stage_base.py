"""Settings that every stage has (inputs, seed, resources), and the questions that every stage answers about itself."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from nanodag.config.section import Auto, Natural, Seconds, Section, StageSection, in_sections, operational
from nanodag.data.config import SourceConfig
from nanodag.data.records import Wanted
from nanodag.registry import optimizer_named

if TYPE_CHECKING:
    from nanodag.config.derive import Derived
    from nanodag.config.kinds.evaluation import EvalSamplerConfig
    from nanodag.config.model_size import ModelSize
    from nanodag.config.rl_parts import EntryConfig, SamplerConfig


class Resources(StageSection):
    """Devices, ranks and machines of a stage."""

    num_ranks: Annotated[int, Field(ge=1, le=100_000)] | Auto = "auto"
    """Training processes on all nodes together, one for each GPU. `auto`: all GPUs, or cores, that a step of the stage
    has work for."""
    threads: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    """CPU threads of each process; `auto` shares out the cores. A stage that takes fewer leaves the others to a branch
    beside it."""
    device: Literal["cpu", "cuda"] | Auto = "auto"
    """The kind of device: `cpu` or `cuda`; `auto` takes the pipeline's `device`, and `cpu` for a stage that multiplies
    nothing."""
    nodes: Annotated[int, Field(ge=1, le=10_000)] | Auto = "auto"
    """Machines that share the stage: this one and others of cluster.hostfile. `auto`: one, unless the pipeline is
    resolved for a machine of several nodes."""
    gpus_per_node: int = Field(0, ge=0, le=10_000)
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

    def check_settings(self) -> None:
        if self.work_pool != "none" and self.device == "auto":
            raise ValueError(f"device auto is this machine's, not that of work_pool {self.work_pool}; say cpu or cuda")
        if self.gpus_per_node and self.device == "cpu":
            raise ValueError(f"gpus_per_node {self.gpus_per_node} means nothing on device cpu; set num_ranks")
        if self.num_ranks == "auto" or self.nodes == "auto":
            return
        if self.num_ranks % self.nodes:
            raise ValueError(f"num_ranks {self.num_ranks} is not a multiple of nodes {self.nodes}; each has as many")
        if self.gpus_per_node not in (0, self.num_ranks // self.nodes):
            raise ValueError(
                f"num_ranks {self.num_ranks} is not nodes {self.nodes} x gpus_per_node {self.gpus_per_node}; leave one "
                "of them out"
            )


class ExternalInput(NamedTuple):
    """Something outside of the pipeline that a stage reads besides its data. setting: its dotted name in the stage.
    what: `model`, a folder or a name of the hub; `rollouts`, files of them; `server`, a URL that scores; `core`, CORE's
    bundle, which the key leaves out. name: as the setting says it. num_steps: those that rollouts must fill."""

    setting: str
    what: str
    name: str
    num_steps: int = 0


def from_setting(name: str) -> Any:
    """A stage's answer that is one of its settings, by the dotted name."""
    return property(attrgetter(name))


def answer(of: Callable[[Any], Any]) -> Any:
    """A stage's answer that follows from its settings. of: gets the stage."""
    return property(of)


class StageBase(Section):
    """Base of every kind's config. A kind overrides what it answers differently, a value also by a property.

    record_kind: the kind of record that its data are read as; None for rows as they are. curves: the report's plots of
    its training. plan_formula: `module:NAME` of its nanodag.plan.case.Formula. makes_rollouts: its records hold
    rollouts. asks_policy: `evaluation.benchmarks` are asked of the policy while it trains.
    """

    record_kind: ClassVar[Wanted | None] = None
    curves: ClassVar[Literal["", "loss", "rollouts"]] = ""
    plan_formula: ClassVar[str] = "nanodag.plan.small_stages:UNKNOWN"
    makes_rollouts: ClassVar[bool] = False
    asks_policy: ClassVar[bool] = False
    # learned_sources: the data that its model is trained on. is_from_scratch: its model begins at random weights.
    # known_model: the one that its weights are copied from, `hub:owner/name` or `file:FOLDER`; empty for none.
    # known_code: whose code computes that model; empty for what its folder says. lora_rank: of the adapters that are
    # trained in the place of all weights; 0 without. lora_base: what matrices below them are held in, `whole` or `nf4`.
    # guest: the section of samplers with an environment of their own.
    # shares_torch: the setting for which trainer and samplers must have one torch and one NCCL, as `weights.sync=ipc`.
    # extends_to: positions that its model is declared for from here on; 0 keeps them.
    # measures_held_out: rows that its data hold out are read. is_served: somebody else's server computes its model: it
    # needs no GPU, and gets written answers alone. asks_in_chat: the items of its benchmarks pass the chat template.
    # spare_gpus: that it takes on top where nobody holds them. vocabulary_size: of the tokenizer that it makes; 0 where
    # it makes none, or does not say. own_gpus: of a node, that its ranks leave to samplers. step_size: of a step
    # that trains: its tokens, tokens of a row, rows that ranks share out evenly (0: in any way), and ranks that belong
    # together.
    learned_sources: ClassVar[tuple[SourceConfig, ...]] = ()
    is_from_scratch: ClassVar[bool] = False
    known_model: ClassVar[str] = ""
    known_code: ClassVar[Literal["", "transformers"]] = ""
    lora_rank: ClassVar[int] = 0
    lora_base: ClassVar[str] = "whole"
    extends_to: ClassVar[int] = 0
    guest: ClassVar["SamplerConfig | EvalSamplerConfig | None"] = None
    shares_torch: ClassVar[str] = ""
    measures_held_out: ClassVar[bool] = False
    is_served: ClassVar[bool] = False
    asks_in_chat: ClassVar[bool] = True
    spare_gpus: ClassVar[int] = 0
    vocabulary_size: ClassVar[int] = 0
    own_gpus: ClassVar[int] = 0
    step_size: ClassVar[tuple[int, int, int, int]] = 0, 0, 0, 1

    kind: str
    inputs: dict[str, str] = operational({})
    """The stages that this one reads: input name -> stage name."""
    seed: Natural | Auto = "auto"
    """Seed of all random numbers of the stage; `auto` takes the pipeline's."""
    resources: Resources = operational(Resources())
    """Where the stage runs."""
    timeout_s: Seconds = operational(7 * 24 * 3600.0)
    """Seconds after which the stage is ended."""
    stop_timeout_s: Seconds = operational(60.0)
    """Seconds that its processes have to leave a checkpoint when they are told to stop; then they are killed."""

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """A stage from settings by their short names, or in their sections."""
        return cls.model_validate(in_sections(cls, settings))

    def check_inputs(self) -> None:
        """Raise ValueError for inputs that do not fit the stage's other settings, where a kind has such."""

    def mixtures(self) -> Iterator[tuple[str, tuple[SourceConfig, ...]]]:
        """Dotted name and sources of each mixture that it reads."""
        for label in type(self).model_fields:
            sources = getattr(self, label)
            if isinstance(sources, tuple) and sources and all(isinstance(source, SourceConfig) for source in sources):
                yield label, sources

    def external_inputs(self) -> Iterator[ExternalInput]:
        """Things that it reads besides its data and its inputs; the key knows each, and preflight looks at it."""
        yield from ()

    @property
    def is_chat(self) -> bool:
        """True for training on conversations."""
        return self.record_kind in ("chat", "preference", "judgement", "stepwise")

    @property
    def is_on_gpus_here(self) -> bool:
        """True where it runs on this machine's GPUs, and not on those of a work pool."""
        return self.resources.device == "cuda" and self.resources.work_pool == "none"

    def load_entry(self, entry: "EntryConfig") -> Callable[..., Any] | None:
        """The function that an entry names, with its options and the settings that it takes; None where it is called in
        a way that only the stage's worker knows."""
        return None

    @property
    def machines(self) -> dict[str, int]:
        """Settings that take other machines -> how many machines each names."""
        return {"resources.nodes": self.resources.num_nodes} if self.resources.num_nodes > 1 else {}

    def num_gpus(self, available: int) -> int:
        """GPUs of a node that a stage on GPUs takes; one for each rank there. available: those of the machine."""
        return int(self.resources.num_ranks) // self.resources.num_nodes

    def own_evaluation(self, name: str) -> "StageBase | None":
        """The benchmarks that it asks while it trains, as an eval stage with the same items, samples and seeds; None
        without any. name: of this stage."""
        return None

    def on_another_machine(self, **updates: Any) -> Self:
        """The stage with `auto` for what follows from a machine, for a run on another one."""
        return self.model_copy(update={"resources": Resources(), **updates})

    def before_ranks(self, derived: "Derived") -> Self:
        """The stage without `auto` among the settings that its number of ranks follows from."""
        return self

    def ranks_on_cpu(self, model: "ModelSize | None", derived: "Derived") -> list[int]:
        """Numbers of ranks that a node without GPUs may have, ascending."""
        derived.note("resources.num_ranks", "ranks_one")
        return [1]

    def after_ranks(self, model: "ModelSize | None", derived: "Derived") -> Self:
        """The stage without any `auto`, once its ranks are known. model: None where its size is not known."""
        return self


class TrainedStage(StageBase):
    """A stage that trains a model with tensors of its own: what decides how much memory that takes.

    scores_tokens: the head keeps the log-probability of each token. packs_documents: rows hold several documents, which
    do not attend to each other. optimizer_name: a shipped one. held_models: models whose weights, gradients and states
    ranks hold, and models whose weights alone each rank holds. room_share: of a rank's memory, that samplers leave it.
    """

    scores_tokens: ClassVar[bool] = False
    packs_documents: ClassVar[bool] = False
    optimizer_name: ClassVar[str] = "adamw"
    held_models: ClassVar[tuple[int, int]] = 1, 0
    room_share: ClassVar[float] = 1.0

    @property
    def trainer(self) -> Any:
        """The section with precision, zero_stage, micro_batch_tokens and activation_checkpointing."""
        return self
