"""Settings of pretraining, midtraining and SFT: shape, optimizer, schedule, the loop's settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from nanodag import registry
from nanodag.config.derive_hardware import Derived, fit_supervised, supervised_ranks_on_cpu
from nanodag.config.derive_schedule import check_batch, scheduled
from nanodag.config.kind import MODEL, Kind
from nanodag.config.model_size import ModelSize
from nanodag.config.section import WHOLE, Auto, Natural, Precision, Share, StageSection, operational
from nanodag.config.stage_base import ExternalInput, TrainedStage
from nanodag.data.config import SourceConfig
from nanodag.data.core_tasks import FEWEST_ITEMS, bundle_url
from nanodag.data.records import Wanted


class ShapeConfig(StageSection):
    """A model's shape."""

    depth: int = Field(0, ge=0, le=128)
    """Layers. Sizes that are `auto` follow from it (nanodag.config.dial). 0 takes the shape of inputs.model."""
    width: Annotated[int, Field(ge=16, le=1_000_000)] | Auto = "auto"
    """Width of the residual stream, in elements."""
    num_heads: Annotated[int, Field(ge=1, le=1_000_000)] | Auto = "auto"
    """Query heads of a layer."""
    num_kv_heads: Annotated[int, Field(ge=1, le=1_000_000)] | Auto = "auto"
    """Key-value heads of a layer; it divides num_heads."""
    head_width: Annotated[int, Field(ge=8, le=1_000_000)] | Auto = "auto"
    """Width of a head, in elements; even, because rotary positions turn pairs."""
    mlp_width: Annotated[int, Field(ge=16, le=1_000_000)] | Auto = "auto"
    """Inner width of the SwiGLU MLP, in elements."""
    tied_embeddings: bool | Auto = "auto"
    """Whether the token embedding and the output head share one matrix."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary positions' wavelengths."""
    max_positions: int = Field(2048, ge=16, le=100_000_000)
    """Longest sequence that the model is declared for, in tokens."""


if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[registry.names("optimizer")]


class OptimizerConfig(StageSection):
    """One optimizer for all weights, or one for matrices and AdamW for the rest. Rates are peaks of the schedule."""

    name: OptimizerName = "muon"
    """A shipped optimizer: of all weights, or of matrices, with AdamW for the rest."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] | Auto = "auto"
    """Peak learning rate; with an optimizer of matrices, AdamW's, of embeddings and head."""
    matrix_lr: Annotated[float, Field(gt=0, le=1)] | Auto = "auto"
    """Peak learning rate of an optimizer of matrices."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0, le=0.1)
    """AdamW's term against division by zero."""
    weight_decay: float = Field(0.0, ge=0, le=10)
    """Decoupled weight decay, a share of the learning rate a step."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Muon's momentum."""

    @property
    def traits(self) -> registry.OptimizerEntry:
        """Traits of the optimizer, known without importing it."""
        return registry.optimizer_named(self.name)


class ScheduleConfig(StageSection):
    """Linear warm-up over the first fraction of steps, flat, then linear decay over the last fraction to final_fraction
    of the peak."""

    warmup_fraction: float = Field(0.02, ge=0, le=1)
    """Share of the steps over which the rate rises from 0."""
    decay_fraction: float = Field(0.5, ge=0, le=1)
    """Share of the steps, at the end, over which the rate falls linearly."""
    final_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the peak rate that is left at the last step."""

    @model_validator(mode="after")
    def _fits(self) -> "ScheduleConfig":
        if self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                f"warmup_fraction {self.warmup_fraction} + decay_fraction {self.decay_fraction} exceed 1; lower one"
            )
        return self


class SupervisedStage(TrainedStage):
    """The one supervised loop. Tokens are counted over all ranks."""

    record_kind: ClassVar[Wanted | None] = "document"
    curves: ClassVar[Literal["", "loss", "rollouts"]] = "loss"
    plan_formula: ClassVar[str] = "nanodag.plan.supervised:SUPERVISED"
    packs_documents: ClassVar[bool] = True

    data: tuple[SourceConfig, ...] = Field(min_length=1)
    """The mixture of training data."""
    precision: Precision | Auto = "auto"
    """Number format of weights and products. `auto`: bf16 where the device multiplies it faster (GPUs from compute
    capability 8, processors with AVX512-BF16 or AMX), else fp32."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], WHOLE] = 1
    """DeepSpeed's ZeRO stage: what ranks share of optimizer states (1), gradients (2) and weights (3)."""
    sequence_length: int = Field(2048, ge=8, le=100_000_000)
    """Tokens of a packed row."""
    batch_tokens: Annotated[int, Field(ge=8, le=10**12)] | Auto = "auto"
    """Tokens of a step, over all ranks; `auto` follows from depth and horizon."""
    micro_batch_tokens: Annotated[int, Field(ge=8, le=10**12)] | Auto = "auto"
    """Tokens that one rank holds at once. `auto`: the largest number that divides a step, fits the device's memory, and
    is no larger than what fills the device."""
    horizon_tokens: Natural | Auto = "auto"
    """Tokens of the whole training. `auto`: pretraining takes the dial's; the others train num_epochs over their
    data."""
    max_steps: int = Field(0, ge=0)
    """Steps after which training ends early; 0 for no limit."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its rates."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rate changes over the steps."""
    gradient_clipping: float = Field(1.0, ge=0, le=1_000_000)
    """Largest global gradient norm; 0 for no clipping."""
    activation_checkpointing: bool | Auto = "auto"
    """Whether activations are computed again in the backward pass instead of kept: less memory, about a third more
    work. `auto`: where a micro-batch that fills the device would not fit otherwise."""
    compile: bool | Auto = operational("auto")
    """Whether torch.compile compiles the layers; `auto` does wherever it has a compiler for the device. On a CPU our
    own code takes layers whose widths are multiples of 16, half a head's too, and only others are compiled."""
    validation_tokens: int = Field(262_144, ge=0)
    """Held-out tokens that an evaluation of the loss reads; 0 for none."""
    validation_every: int = Field(100, ge=1)
    """Steps between evaluations of the validation loss."""
    patience: int = Field(0, ge=0)
    """Evaluations without a better validation loss after which training ends and the best weights are kept; 0 for
    never."""
    core_every: int = operational(0, ge=0)
    """Steps between evaluations of CORE on the weights under training, by all ranks, and one at the end; 0 for none. It
    needs core_bundle."""
    core_limit: int = operational(500, ge=0)
    """Items of each of CORE's 22 tasks that it is scored on while training, 11 or more; 0 for all."""
    core_bundle: str = operational("auto", pattern=r"^(auto|none|/.+)$")
    """The folder of CORE's items, as an absolute path; `auto`: the pipeline's core_bundle."""
    checkpoint_every: int = operational(200, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = operational(2, ge=1)
    """Newest checkpoints that are kept while the stage runs."""
    log_every: int = operational(10, ge=1)
    """Steps between lines in the log."""
    sample_prompts: tuple[str, ...] = operational(())
    """Prompts that the model continues at each evaluation, for the log."""

    @model_validator(mode="after")
    def _fits(self) -> "SupervisedStage":
        if 0 < self.core_limit < FEWEST_ITEMS:
            raise ValueError(
                f"core_limit {self.core_limit} is too few for CORE's worked examples; take {FEWEST_ITEMS} or 0"
            )
        is_held_out = any(source.held_out for source in self.data)
        if self.patience and not (self.validation_tokens and is_held_out):
            why = f"validation_tokens is {self.validation_tokens}" if is_held_out else "no source of data has held_out"
            raise ValueError(
                f"patience {self.patience} waits for a better validation loss, and {why}; give a source held_out, as "
                "0.05, and validation_tokens above 0, or leave patience out"
            )
        self.resources.check_offload(zero_stage=self.zero_stage, optimizer=self.optimizer.name)
        return self

    @property
    def passes(self) -> float:
        """Passes over the data where horizon_tokens is auto; 0 where tokens alone are counted."""
        return 0.0

    @property
    def packing(self) -> dict[str, Any]:
        """Options of the batches beside those that all kinds have."""
        return {}

    @property
    def learned_sources(self) -> tuple[SourceConfig, ...]:
        return self.data

    @property
    def measures_held_out(self) -> bool:
        return self.validation_tokens > 0

    def external_inputs(self) -> Iterator[ExternalInput]:
        """CORE's bundle, where it is scored on it."""
        if self.core_every:
            yield ExternalInput("core_bundle", "core", bundle_url(self.core_bundle))

    @property
    def optimizer_name(self) -> str:
        return self.optimizer.name

    @property
    def step_size(self) -> tuple[int, int, int, int]:
        """Tokens of a step, tokens of a row, rows that ranks share out evenly; no ranks belong together."""
        return int(self.batch_tokens), self.sequence_length, int(self.batch_tokens) // self.sequence_length, 1

    def with_core(self, bundle: str, derived: Derived) -> tuple[Self, bool]:
        """The stage with the bundle that it is scored on while it trains."""
        if self.core_bundle != "auto":
            return self, False
        updates: dict[str, Any] = {"core_bundle": bundle}
        derived.origins[f"{derived.name}.core_bundle"] = "derived: the pipeline's core_bundle"
        is_left_out = bundle == "none" and self.core_every > 0
        if is_left_out:
            updates["core_every"] = 0
            derived.origins[f"{derived.name}.core_every"] = "derived: core_bundle is none"
        return self.model_copy(update=updates), is_left_out

    def before_ranks(self, derived: Derived) -> Self:
        """The stage with its schedule."""
        return scheduled(self, derived)

    def ranks_on_cpu(self, model: ModelSize | None, derived: Derived) -> list[int]:
        return super().ranks_on_cpu(model, derived) if model is None else supervised_ranks_on_cpu(self, model, derived)

    def after_ranks(self, model: ModelSize | None, derived: Derived) -> Self:
        """The stage without any `auto`. Raises ConfigError for a batch that its ranks cannot share out."""
        stage = fit_supervised(self, model, derived)
        check_batch(stage, derived)
        return stage


class ChatStage(SupervisedStage):
    """Training of a model (input `model`) on conversations, loss on assistant tokens, and beside them on documents
    (`adapter: text`), loss on every token. Validation is on held-out conversations; on documents, where no
    conversations are held out."""

    record_kind: ClassVar[Wanted | None] = "chat"

    num_epochs: float = Field(1.0, gt=0, le=1_000_000)
    """Passes over the data where horizon_tokens is auto."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """What happens to a conversation longer than sequence_length: `truncate` or `drop`."""

    @property
    def passes(self) -> float:
        return self.num_epochs

    @property
    def packing(self) -> dict[str, Any]:
        return {"too_long": self.overlong}


@dataclass(frozen=True, kw_only=True)
class SupervisedKind(Kind):
    """A kind that runs the one supervised loop."""

    module: str = "nanodag.train"
    code_version: int = 4
    makes: str = MODEL
    trains: bool = True
    has_ranks: bool = True
    less_memory: str = "micro_batch_tokens=2048"
    lower_rate: str = "optimizer.learning_rate=1e-4"
