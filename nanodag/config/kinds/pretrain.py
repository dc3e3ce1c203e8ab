"""Pretraining, from a shape or from a model."""

from typing import Self

from pydantic import Field

from nanodag.config.derive_hardware import Derived
from nanodag.config.derive_schedule import shaped
from nanodag.config.kind import MODEL, TOKENIZER
from nanodag.config.supervised import ShapeConfig, SupervisedKind, SupervisedStage


class PretrainStage(SupervisedStage):
    """Training on documents: from random weights of a shape (input `tokenizer`), or from a model that there is (input
    `model`; continued pretraining: shape is left out, horizon_tokens given)."""

    shape: ShapeConfig = ShapeConfig()
    """The model's shape."""
    tokens_per_parameter: float = Field(10.5, gt=0, le=1_000_000)
    """Horizon in tokens for each parameter in matrices and output head, where horizon_tokens is auto."""

    @property
    def continues(self) -> bool:
        """True where it begins at the weights of another stage's model."""
        return self.shape.depth == 0

    @property
    def is_from_scratch(self) -> bool:
        return not self.continues

    def before_ranks(self, derived: Derived) -> Self:
        """The stage with its shape and schedule."""
        stage = shaped(self, derived.name, derived.origins) if self.is_from_scratch else self
        return super(PretrainStage, stage).before_ranks(derived)

    def check_inputs(self) -> None:
        """Raise ValueError unless it begins at one thing, and says what that thing needs."""
        if ("tokenizer" in self.inputs) == ("model" in self.inputs):
            labels = ", ".join(self.inputs) or "none"
            raise ValueError(
                f"inputs: found {labels}; name either a tokenizer, to begin at random weights, or a model, to continue"
            )
        if "tokenizer" in self.inputs:
            if self.continues:
                raise ValueError("shape.depth is missing: random weights need one, as in shape: {depth: 4}")
            return
        if self.shape != ShapeConfig():
            raise ValueError("shape is that of inputs.model; leave it out, or name a tokenizer to begin from scratch")
        if self.horizon_tokens in ("auto", 0):
            raise ValueError(
                f"horizon_tokens {self.horizon_tokens}: the dial's is for random weights; say for how many tokens the "
                "model of inputs.model goes on"
            )
        if self.tokens_per_parameter != type(self).model_fields["tokens_per_parameter"].default:
            raise ValueError("tokens_per_parameter means nothing to a model that goes on; leave it out")


KIND = SupervisedKind(
    name="pretrain",
    config=PretrainStage,
    may_take={"tokenizer": TOKENIZER, "model": MODEL},  # one of them, see check_inputs
    label="BASE",
    order=30,
)
