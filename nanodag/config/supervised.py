"""What pretraining, midtraining and SFT share: shape, optimizer, schedule, the loop's settings."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from nanodag.config.section import Auto, Natural, Positive, Precision, Rate, Section, Share, operational
from nanodag.config.stage_base import StageBase
from nanodag.data.config import SourceConfig


class ShapeConfig(Section):
    """A model's shape; what is `auto` follows from depth (nanodag.config.dial). depth: 0 for the shape of inputs.model,
    where the stage begins at one."""

    depth: int = Field(0, ge=0, le=128)
    width: Annotated[int, Field(ge=16)] | Auto = "auto"
    num_heads: Positive | Auto = "auto"
    num_kv_heads: Positive | Auto = "auto"
    head_width: Annotated[int, Field(ge=8)] | Auto = "auto"
    mlp_width: Annotated[int, Field(ge=16)] | Auto = "auto"
    tied_embeddings: bool | Auto = "auto"
    rope_theta: float = Field(10_000.0, gt=0)
    max_positions: int = Field(2048, ge=16)


class OptimizerConfig(Section):
    """AdamW for all, or Muon for matrices and AdamW for the rest.

    learning_rate: AdamW's (with Muon: embeddings and head). matrix_lr: Muon's. Both are peaks of the schedule.
    """

    name: Literal["adamw", "muon"] = "muon"
    learning_rate: Rate | Auto = "auto"
    matrix_lr: Rate | Auto = "auto"
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.95, ge=0, lt=1)


class ScheduleConfig(Section):
    """Linear warm-up over the first fraction of steps, flat, then linear decay over the last fraction to final_fraction
    of the peak."""

    warmup_fraction: float = Field(0.02, ge=0, le=1)
    decay_fraction: float = Field(0.5, ge=0, le=1)
    final_fraction: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _fits(self) -> "ScheduleConfig":
        if self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                f"warmup_fraction {self.warmup_fraction} + decay_fraction {self.decay_fraction} exceed 1; lower one"
            )
        return self


class SupervisedStage(StageBase):
    """The one supervised loop. Tokens are counted over all ranks.

    data: the mixture. precision: `auto` for bf16 where the device multiplies it faster than fp32 (GPUs from compute
    capability 8, processors with AVX512-BF16 or AMX), else fp32. batch_tokens: a step's tokens. micro_batch_tokens:
    what one rank holds at once. horizon_tokens: where it ends (`auto`: pretrain takes the dial's, the others 0:
    num_epochs over the data). max_steps: ends earlier, 0 for never. gradient_clipping: largest global gradient norm, 0
    for none. patience: with evals of the validation loss, how many without a better one end the stage, the best weights
    being kept; 0 for never.
    """

    data: tuple[SourceConfig, ...] = Field(min_length=1)
    precision: Precision | Auto = "auto"
    zero_stage: Literal[0, 1, 2, 3] = 1
    sequence_length: int = Field(2048, ge=8)
    batch_tokens: Annotated[int, Field(ge=8)] | Auto = "auto"
    micro_batch_tokens: Annotated[int, Field(ge=8)] | Auto = "auto"
    horizon_tokens: Natural | Auto = "auto"
    max_steps: int = Field(0, ge=0)
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    gradient_clipping: float = Field(1.0, ge=0)
    activation_checkpointing: bool = False
    compile: bool = operational(True)
    validation_tokens: int = Field(262_144, ge=0)
    validation_every: int = Field(100, ge=1)
    patience: int = Field(0, ge=0)
    checkpoint_every: int = operational(200, ge=1)
    keep_checkpoints: int = operational(2, ge=1)
    log_every: int = operational(10, ge=1)
    sample_prompts: tuple[str, ...] = operational(())

    @model_validator(mode="after")
    def _can_be_offloaded(self) -> "SupervisedStage":
        self.resources.check_offload(zero_stage=self.zero_stage, optimizer=self.optimizer.name)
        return self


class ChatStage(SupervisedStage):
    """From a model, on conversations, loss on assistant tokens, and beside them on documents (`adapter: text`), loss on
    every token. Validation is on held-out conversations; on documents, where no conversations are held out. Input:
    `model`.

    num_epochs: passes over the data when horizon_tokens is auto. overlong: what becomes of a conversation longer than
    sequence_length.
    """

    num_epochs: float = Field(1.0, gt=0)
    overlong: Literal["truncate", "drop"] = "truncate"
