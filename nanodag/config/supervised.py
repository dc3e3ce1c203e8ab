"""Settings of pretraining, midtraining and SFT: shape, optimizer, schedule, the loop's settings."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from nanodag import registry
from nanodag.config import derive
from nanodag.config.dial import Shape, schedule_of, shape_of
from nanodag.config.kind import MODEL, Kind
from nanodag.config.kinds.evaluation import BenchmarkConfig, EvalStage, asked_in_training, check_names
from nanodag.config.model_size import ModelSize, model_of, pretrain_of
from nanodag.config.section import WHOLE, Auto, Filler, Natural, Share, StageSection, later, operational
from nanodag.config.stage_base import ExternalInput, TrainedStage, answer, from_setting
from nanodag.data.config import SourceConfig
from nanodag.data.core_tasks import FEWEST_ITEMS, bundle_url
from nanodag.data.records import Wanted
from nanodag.errors import ConfigError
from nanodag.host.machine import GIB

ASKED_CACHE_BYTES = 2 * GIB  # of each sampler, beside a trainer


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
    extend_to: int = later(0, ge=0, le=100_000_000)
    """Positions that a model of inputs.model is declared for from here on, at most sequence_length; 0 keeps its own."""
    extend_by: Literal["yarn", "ntk"] = later("yarn")
    """How its angles are stretched for them: `yarn`, or `ntk`, a higher base of all wavelengths."""

    def filled(self, stage: str, origins: dict[str, str]) -> "ShapeConfig":
        """The shape without `auto`: by the dial, and heads and MLP by a width that was given by hand. stage: its name.

        Raises ConfigError for heads that do not go together."""
        dial, fill = shape_of(self.depth), Filler(self, f"{stage}.shape", origins)
        sizes = ("width", "num_heads", "num_kv_heads", "head_width", "mlp_width", "tied_embeddings")
        width, num_heads, _, head_width, *_ = (fill(size, getattr(dial, size), f"depth {self.depth}") for size in sizes)
        if self.width != "auto":
            of_width: dict[str, int] = {}
            if self.head_width == "auto" and width % head_width:
                head_width = of_width["head_width"] = next(h for h in (128, 64, 32, 16, 8, width) if width % h == 0)
            if self.num_heads == "auto":
                num_heads = of_width["num_heads"] = max(1, width // head_width)
            if self.num_kv_heads == "auto":
                of_width["num_kv_heads"] = num_heads
            if self.mlp_width == "auto":
                of_width["mlp_width"] = -(-8 * width // 3 // 64) * 64
            fill.updates |= of_width
            origins.update({f"{stage}.shape.{size}": f"derived: width {width}" for size in of_width})
        shape = fill.filled
        if int(shape.num_heads) % int(shape.num_kv_heads):
            raise ConfigError(
                f"{stage}.shape.num_kv_heads: {shape.num_kv_heads} does not divide num_heads {shape.num_heads}; "
                "each key-value head serves a whole number of heads."
            )
        if int(shape.head_width) % 2:
            raise ConfigError(
                f"{stage}.shape.head_width: {shape.head_width} is odd; rotary positions turn pairs. Set an even one, "
                "or a width that an even number divides."
            )
        return shape

    def as_shape(self) -> Shape:
        """The Shape that this describes, once nothing is `auto`."""
        return Shape(**{field.name: getattr(self, field.name) for field in fields(Shape)})


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
    momentum_warmup: int = later(0, ge=0, le=1_000_000)
    """Updates over which Muon's momentum rises from 0.85."""
    lora_rank: int = Field(0, ge=0, le=8192)
    """Rank of LoRA adapters on every matrix of the layers; 0 trains all weights."""
    lora_alpha: float = Field(32.0, gt=0, le=100_000)
    """LoRA's scale, divided by the rank."""
    lora_save: Literal["merged", "adapter"] = later("merged")
    """What the stage leaves: the merged model, or the adapters alone, which are merged where the model is asked for."""
    lora_base: Literal["whole", "nf4"] = later("whole")
    """Number format of the matrices below the adapters: the stage's, or 4 bits, NormalFloat (QLoRA), for less memory.
    With nf4 the product is the 4-bit model with its adapters, merged."""

    @property
    def traits(self) -> registry.OptimizerEntry:
        """Traits of the optimizer, known without importing it."""
        return registry.optimizer_named(self.name)


class ScheduleConfig(StageSection):
    """Linear warm-up over the first fraction of steps, flat, then decay over the last fraction to final_fraction of the
    peak. A cosine over all steps behind the warm-up: decay_fraction is 1 less warmup_fraction."""

    warmup_fraction: float = Field(0.02, ge=0, le=1)
    """Share of the steps over which the rate rises from 0."""
    decay_fraction: float = Field(0.5, ge=0, le=1)
    """Share of the steps, at the end, over which the rate falls."""
    learning_rate_decay: Literal["linear", "cosine"] = later("linear")
    """How the rate falls there."""
    final_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the peak rate that is left at the last step."""

    def check_settings(self) -> None:
        if self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                f"warmup_fraction {self.warmup_fraction} + decay_fraction {self.decay_fraction} exceed 1; lower one"
            )


class SupervisedStage(TrainedStage):
    """The one supervised loop. Tokens are counted over all ranks.

    objective: `module:NAME` of the class of what it trains for, in nanodag.train.objective's form.
    """

    record_kind: ClassVar[Wanted | None] = "document"
    curves: ClassVar[Literal["", "loss", "rollouts"]] = "loss"
    plan_formula: ClassVar[str] = "nanodag.plan.supervised:SUPERVISED"
    packs_documents: ClassVar[bool] = True
    objective: ClassVar[str] = "nanodag.train.objective:NextToken"
    # passes: over the data where horizon_tokens is auto; 0 where tokens alone are counted. passes_before: over it, in
    # which the model scores the data before it trains.
    passes: ClassVar[float] = 0.0
    passes_before: ClassVar[float] = 0.0

    data: tuple[SourceConfig, ...] = Field(min_length=1)
    """The mixture of training data."""
    precision: Literal["fp32", "bf16", "fp8"] | Auto = "auto"
    """Number format of weights and products. `auto`: bf16 where the device multiplies it faster (GPUs from compute
    capability 8, processors with AVX512-BF16 or AMX), else fp32. fp8: bf16, but for the products of layers, by torchao;
    GPUs from compute capability 8.9 gain by it, others emulate it."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], WHOLE] = 1
    """DeepSpeed's ZeRO stage: what ranks share of optimizer states (1), gradients (2) and weights (3)."""
    sequence_length: int = Field(2048, ge=8, le=100_000_000)
    """Tokens of a packed row."""
    batch_tokens: Annotated[int, Field(ge=8, le=10**12)] | Auto = "auto"
    """Tokens of a step, over all ranks; `auto` follows from depth and horizon."""
    micro_batch_tokens: Annotated[int, Field(ge=8, le=10**12)] | Auto = "auto"
    """Tokens that one rank holds at once, or sequence_parallel ranks together. `auto`: the largest number that divides
    a step, fits the device's memory, and is no larger than what fills the device."""
    sequence_parallel: int = later(1, ge=1, le=1024)
    """Ranks that share each row (Ulysses), so that it may be longer than one of them could hold."""
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
    core_bundle: str = operational("auto", pattern=r"^(auto|none|/.+|https?://.+)$")
    """The folder of CORE's items, an absolute path, or their archive's URL; `auto`: the pipeline's core_bundle."""
    benchmarks: tuple[BenchmarkConfig, ...] = operational(())
    """Benchmarks that the weights under training are asked in the chat's form, as an eval stage asks them, by a process
    beside the trainer, which waits. nanochat's six chat tasks together make `chat_core`."""
    benchmarks_every: int = operational(500, ge=1)
    """Steps between evaluations on `benchmarks`; there is one at the end, too."""
    checkpoint_every: int = operational(200, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = operational(2, ge=1)
    """Newest checkpoints that are kept while the stage runs."""
    log_every: int = operational(10, ge=1)
    """Steps between lines in the log."""
    sample_prompts: tuple[str, ...] = operational(())
    """Prompts that the model continues at each evaluation, for the log."""

    def check_settings(self) -> None:
        if 0 < self.core_limit < FEWEST_ITEMS:
            raise ValueError(
                f"core_limit {self.core_limit} is too few for CORE's worked examples; take {FEWEST_ITEMS} or 0"
            )
        check_names(self.benchmarks)
        if refused := [b.name for b in self.benchmarks if b.is_core or b.judge != "none"]:
            raise ValueError(
                f"benchmark {refused[0]!r}: CORE is asked by core_every, and what a judge compares by an eval stage"
            )
        if self.patience and not self.measures_held_out:
            is_held_out = any(source.held_out for source in self.data)
            why = f"validation_tokens is {self.validation_tokens}" if is_held_out else "no source of data has held_out"
            raise ValueError(
                f"patience {self.patience} waits for a better validation loss, and {why}; give a source held_out, as "
                "0.05, and validation_tokens above 0, or leave patience out"
            )
        for name in () if self.lora_rank else ("lora_alpha", "lora_save", "lora_base"):
            if getattr(self.optimizer, name) != OptimizerConfig.model_fields[name].default:
                raise ValueError(f"optimizer.{name} means nothing without optimizer.lora_rank; leave it out")
        if self.lora_base == "nf4" and (self.zero_stage == 3 or self.optimizer.lora_save == "adapter"):
            raise ValueError(
                f"optimizer.lora_base nf4 with zero_stage {self.zero_stage} and lora_save {self.optimizer.lora_save}: "
                "ZeRO 3 shares out whole weights alone, and adapters alone would be merged onto the whole base; set "
                "zero_stage to 2 or less, and lora_save to merged"
            )
        if self.sequence_length % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel {self.sequence_parallel} does not divide sequence_length {self.sequence_length}"
            )
        if self.sequence_parallel > 1 and self.objective != SupervisedStage.objective:
            raise ValueError(
                f"sequence_parallel {self.sequence_parallel} shares rows whose tokens are learned, not answers that "
                "are compared; set it to 1"
            )
        self.resources.check_offload(zero_stage=self.zero_stage, optimizer=self.optimizer.name)

    @property
    def packing(self) -> dict[str, Any]:
        """Options of the batches beside those that all kinds have."""
        return {}

    learned_sources = from_setting("data")
    optimizer_name = from_setting("optimizer.name")
    lora_rank = from_setting("optimizer.lora_rank")
    lora_base = from_setting("optimizer.lora_base")
    measures_held_out = answer(lambda s: s.validation_tokens > 0 and any(source.held_out for source in s.data))

    def external_inputs(self) -> Iterator[ExternalInput]:
        """CORE's bundle, where it is scored on it."""
        if self.core_every:
            yield ExternalInput("core_bundle", "core", bundle_url(self.core_bundle))

    def own_evaluation(self, name: str) -> EvalStage | None:
        """The benchmarks that it asks, as an eval stage with little memory, as it stands beside the trainer."""
        device, ranks_here = self.resources.device, int(self.resources.num_ranks) // self.resources.num_nodes
        return asked_in_training(
            self.benchmarks,
            inputs={"model": name},
            seed=self.seed,
            precision="fp32" if device == "cpu" else "bf16" if self.precision == "fp8" else self.precision,
            stop_timeout_s=self.stop_timeout_s / 3,  # the rest is for the trainer's checkpoint
            resources={"device": device, "num_ranks": 1, "threads": int(self.resources.threads) * ranks_here},
            sampler={"engine": "embedded", "cache_bytes": ASKED_CACHE_BYTES},
        )

    @property
    def step_size(self) -> tuple[int, int, int, int]:  # type: ignore[override]
        """Tokens of a step, tokens of a row, parts of rows that ranks share out evenly, ranks that belong together."""
        tokens, length, unit = int(self.batch_tokens), self.sequence_length, self.sequence_parallel
        return tokens, length, tokens // length * unit, unit

    def before_ranks(self, derived: derive.Derived) -> Self:
        """The stage with its horizon, batch and rates, and the bundle that it is scored on while it trains."""
        name, traits = derived.name, self.optimizer.traits
        fill, rates = derived.filler(self), derived.filler(self.optimizer, "optimizer")
        bundle = fill("core_bundle", derived.pipeline.core_bundle, "the pipeline's core_bundle")
        if bundle == "none" and self.core_every:
            fill.updates["core_every"] = 0
            derived.origins[f"{name}.core_every"] = derive.CORE_LEFT_OUT
        source, model = pretrain_of(derived.pipeline, name), model_of(derived.pipeline, name)
        if source is not None and model is not None:
            sizes = {"horizon_tokens": self.horizon_tokens, "batch_tokens": self.batch_tokens}
            fixed_sizes = {field: int(value) for field, value in sizes.items() if value != "auto"}
            ratio = source.tokens_per_parameter
            of_model = partial(schedule_of, model.shape, model.vocabulary, tokens_per_parameter=ratio)
            dial, schedule = of_model(), of_model(**fixed_sizes)
            why = f"depth {model.shape.depth}, {model.total:,} parameters"
            for field in sizes if self.is_from_scratch else ("batch_tokens",):
                fill(field, getattr(schedule, field), why)
                if field in fixed_sizes:
                    derived.origins[f"{name}.{field}!"] = f"the dial says {getattr(dial, field):,}"
            # One learning rate for all weights is 7 to 35 times lower than what embeddings alone take beside Muon.
            of_all = round(schedule.matrix_lr / traits.dial_divisor, 6)
            rates("learning_rate", of_all if traits.takes_all else schedule.embedding_lr, why)
            rates("matrix_lr", schedule.matrix_lr / (1 if traits.takes_all else traits.dial_divisor), why)
        elif traits.takes_all and self.optimizer.matrix_lr == "auto":
            rates.updates["matrix_lr"] = self.optimizer.learning_rate
        if "horizon_tokens" not in fill.updates:
            fill("horizon_tokens", 0, "0, num_epochs decides")
        stage = fill.filled.model_copy(update={"optimizer": rates.filled})
        for setting in ("batch_tokens", "optimizer.learning_rate", "optimizer.matrix_lr"):
            if attrgetter(setting)(stage) == "auto":
                raise ConfigError(f"{name}.{setting}: auto needs a pretrain stage above it; give a number.")
        return stage

    def ranks_on_cpu(self, model: ModelSize | None, derived: derive.Derived) -> list[int]:
        """Numbers of ranks with which few cores are idle and memory holds a row of each, ascending."""
        if model is None:
            return super().ranks_on_cpu(model, derived)
        derived.note("resources.num_ranks", "ranks_cpu")
        cores, row = derived.machine.cores, self.sequence_length * derive.token_bytes(self, model, checkpointed=False)
        most = min(derive.NUMBERS["max_cpu_ranks"], cores)
        busy = [ranks for ranks in range(2, most + 1) if 4 * ranks * (cores // ranks) >= 3 * cores]
        return [1, *(r for r in busy if derive.free_bytes(self, model, derived.machine, r, r) > row)]

    def after_ranks(self, model: ModelSize | None, derived: derive.Derived) -> Self:
        """The stage without any `auto`. Raises ConfigError for a batch that its ranks cannot share out."""
        device, length = str(self.resources.device), self.sequence_length
        batch, unit = int(self.batch_tokens), self.sequence_parallel
        groups = int(self.resources.num_ranks) // unit
        stage = derive.offloaded(self, model, self.optimizer.traits.offloads and self.zero_stage > 0, derived)
        of_group, limit = max(1, batch // max(1, groups)), derive.NUMBERS[f"full_tokens_{device}"]
        if device == "cuda" and (model is None or derived.machine.gpu is None):
            limit = derive.NUMBERS["least_tokens"]
        least = min(derive.NUMBERS["least_tokens"] if device == "cuda" else length, of_group)
        if self.micro_batch_tokens != "auto":
            least = int(self.micro_batch_tokens)
        fill = derived.filler(stage)
        fitting = partial(derive.fitting_tokens, stage, model, derived)
        is_tight = fitting(checkpointed=False) * unit < least
        is_checkpointed = bool(fill("activation_checkpointing", is_tight, derived.why("checkpointing")))
        most = min(limit, fitting(checkpointed=is_checkpointed)) * unit
        rows = max(1, of_group // length)  # of which a micro-batch has a whole number that divides them
        widest = next(r for r in range(min(rows, max(1, most // length)), 0, -1) if rows % r == 0)
        micro = int(fill("micro_batch_tokens", widest * length, derived.why("micro", limit=f"{limit:,}")))
        fill("compile", derive.has_compiler(device, derived.machine), derived.why("compile"))
        derive.check_heads(derived.name, unit, model)
        if int(self.resources.num_ranks) % unit or micro % length or batch % (micro * groups):
            each = length * max(1, groups)
            raise ConfigError(
                f"{derived.name}: batch_tokens {batch} must be a multiple of micro_batch_tokens {micro} x num_ranks "
                f"{self.resources.num_ranks} / sequence_parallel {unit}, and micro_batch_tokens a "
                f"multiple of sequence_length {length}. Set batch_tokens to {max(1, round(batch / each)) * each}, "
                "micro_batch_tokens to auto, and num_ranks to a multiple of sequence_parallel."
            )
        return fill.filled


class ChatStage(SupervisedStage):
    """Training of a model (input `model`) on conversations, loss on assistant tokens, and beside them on documents
    (`adapter: text`), loss on every token. Validation is on held-out conversations; on documents, where no
    conversations are held out."""

    record_kind: ClassVar[Wanted | None] = "chat"

    num_epochs: float = Field(1.0, gt=0, le=1_000_000)
    """Passes over the data where horizon_tokens is auto."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """What happens to a conversation longer than sequence_length: `truncate` or `drop`."""

    passes = from_setting("num_epochs")

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
