"""The kinds that run the one supervised loop: pretraining, midtraining, SFT."""

from typing import Self

from pydantic import Field

from nanodag.config.derive import Derived
from nanodag.config.model_size import model_of
from nanodag.config.stage_base import answer, from_setting
from nanodag.config.supervised import ChatStage, ShapeConfig, SupervisedStage
from nanodag.errors import ConfigError


class PretrainStage(SupervisedStage):
    """Training on documents: from random weights of a shape (input `tokenizer`), or from a model that there is (input
    `model`; continued pretraining: shape is left out, horizon_tokens given)."""

    shape: ShapeConfig = ShapeConfig()
    """The model's shape."""
    tokens_per_parameter: float = Field(10.5, gt=0, le=1_000_000)
    """Horizon in tokens for each parameter in matrices and output head, where horizon_tokens is auto."""

    is_from_scratch = answer(lambda stage: stage.shape.depth > 0)
    extends_to = from_setting("shape.extend_to")

    def before_ranks(self, derived: Derived) -> Self:
        """The stage with its shape and schedule. Raises ConfigError for a horizon or rows that the shape has not."""
        stage, name = self, derived.name
        if self.is_from_scratch:
            stage = self.model_copy(update={"shape": self.shape.filled(name, derived.origins)})
            if self.horizon_tokens == 0:
                raise ConfigError(
                    f"{name}.horizon_tokens: 0 trains nothing; give a number, or auto for what the dial says."
                )
            if self.sequence_length > self.shape.max_positions:
                raise ConfigError(
                    f"{name}.sequence_length: {self.sequence_length} is above {name}.shape.max_positions "
                    f"{self.shape.max_positions}; lower the one or raise the other."
                )
        known = None if not self.extends_to else model_of(derived.pipeline, self.inputs["model"])
        if known is not None and self.extends_to <= known.max_positions:
            raise ConfigError(
                f"{name}.shape.extend_to: {self.extends_to} is no more than the {known.max_positions} positions that "
                f"{self.inputs['model']} has; raise it, or leave it out."
            )
        return super(PretrainStage, stage).before_ranks(derived)

    def check_inputs(self) -> None:
        """Raise ValueError unless it begins at one thing, and says what that thing needs."""
        if ("tokenizer" in self.inputs) == ("model" in self.inputs):
            labels = ", ".join(self.inputs) or "none"
            raise ValueError(
                f"inputs: found {labels}; name either a tokenizer, to begin at random weights, or a model, to continue"
            )
        if "tokenizer" in self.inputs:
            if not self.is_from_scratch:
                raise ValueError("shape.depth is missing: random weights need one, as in shape: {depth: 4}")
            if self.extends_to:
                raise ValueError("shape.extend_to extends a model; a new one has shape.max_positions")
            if self.lora_rank:
                raise ValueError(f"optimizer.lora_rank {self.lora_rank} adapts a model, and this one begins at none")
            return
        by = {"extend_to": self.extends_to, "extend_by": self.shape.extend_by} if self.extends_to else {}
        if self.shape != ShapeConfig(**by):
            raise ValueError("shape is that of inputs.model; leave it out, or name a tokenizer to begin from scratch")
        if self.extends_to not in (0, self.sequence_length):
            raise ValueError(
                f"shape.extend_to {self.extends_to} is not sequence_length {self.sequence_length}: a model is declared "
                "for the positions that training reaches, no more and no fewer; make them equal"
            )
        if self.horizon_tokens in ("auto", 0):
            raise ValueError(
                f"horizon_tokens {self.horizon_tokens}: the dial's is for random weights; say for how many tokens the "
                "model of inputs.model goes on"
            )
        if self.tokens_per_parameter != type(self).model_fields["tokens_per_parameter"].default:
            raise ValueError("tokens_per_parameter means nothing to a model that goes on; leave it out")


class MidtrainStage(ChatStage):
    """Chat format, multiple choice and tools, on a large mixture."""


class SFTStage(ChatStage):
    """The last supervised stage."""
