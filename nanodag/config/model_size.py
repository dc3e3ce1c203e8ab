"""A model's shape, which decides memory and work before any of it was built: of models on the hub by name, and of a
stage's model.

`auto` follows from the pipeline and the machine alone, so it cannot look into files that may not be there yet.
"""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from nanodag.config.dial import Shape, flops_per_token, num_parameters
from nanodag.errors import ConfigError
from nanodag.host.beside import table_beside
from nanodag.inference.cache_size import token_bytes

if TYPE_CHECKING:
    from nanodag.config.kinds.training import PretrainStage
    from nanodag.config.pipeline import Pipeline


@dataclass(frozen=True)
class ModelSize:
    """A model's shape. max_positions: tokens of the longest sequence that it is declared for. window: tokens that one
    sees in layers with a sliding window, None where no layer has one. active_mlp_width: that a token is multiplied
    with, of a mixture of experts; None for all."""

    shape: Shape
    vocabulary: int
    max_positions: int
    window: int | None = None
    active_mlp_width: int | None = None

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters by part, as nanodag.config.dial counts them."""
        return num_parameters(self.shape, self.vocabulary)

    @property
    def total(self) -> int:
        return self.parameters["total"]

    def token_bytes(self, element_bytes: int) -> int:
        """Bytes of one token's keys and values in a sampler's cache."""
        return token_bytes(
            num_layers=self.shape.depth,
            num_kv_heads=self.shape.num_kv_heads,
            head_width=self.shape.head_width,
            element_bytes=element_bytes,
        )

    def training_flops(self, length: int) -> int:
        """FLOPs of forward and backward for a token of rows of a length."""
        width = self.shape.mlp_width if self.active_mlp_width is None else self.active_mlp_width
        return flops_per_token(replace(self.shape, mlp_width=width), self.vocabulary, length)

    def forward_flops(self, length: int) -> float:
        """FLOPs of a forward pass for a token that sees so many before it on average."""
        return self.training_flops(length) / 3


_ROWS = table_beside(__file__, "known_models.yaml")
KNOWN = {name: ModelSize(Shape(*shape), *sizes) for name, (shape, *sizes) in _ROWS.items()}


def known_model(model: str) -> ModelSize | None:
    """The size of an import's `model`; None of one that is not known, which gets the careful value of each rule.

    A chat model is its base model's size: `-Instruct` and `-Base` do not matter, nor does a revision."""
    name = model.partition("@")[0]
    return KNOWN.get(re.sub(r"-(Instruct|Base)$", "", name.removeprefix("hub:"))) if name.startswith("hub:") else None


def began_at(pipeline: "Pipeline", name: str) -> str:
    """The stage that a stage's model began in, through all that trained it."""
    while source := pipeline.stages[name].inputs.get("model"):
        name = source
    return name


def pretrain_of(pipeline: "Pipeline", name: str) -> "PretrainStage | None":
    """The stage that a stage's model began in at random weights; None of an imported checkpoint."""
    stage = pipeline.stages[began_at(pipeline, name)]
    return cast("PretrainStage", stage) if stage.is_from_scratch else None


def extended(pipeline: "Pipeline", name: str, model: ModelSize) -> ModelSize:
    """A stage's model, declared for what the last stage that extended it says."""
    stage = pipeline.stages[name]
    if not stage.extends_to and (source := stage.inputs.get("model")):
        return extended(pipeline, source, model)
    return replace(model, max_positions=stage.extends_to or model.max_positions)


def model_of(pipeline: "Pipeline", name: str) -> ModelSize | None:
    """The size of the model that a stage trains or scores, whether its shape was given, derived from its depth, or is
    that of an import that is known; None of another import, and of a stage without a model."""
    began = began_at(pipeline, name)
    if imported := pipeline.stages[began].known_model:
        known = known_model(imported)
        return None if known is None else extended(pipeline, name, known)
    if (source := pretrain_of(pipeline, began)) is None:
        return None
    tokenizer, shape = pipeline.stages[source.inputs["tokenizer"]], source.shape.filled(began, {})
    if not tokenizer.vocabulary_size:
        raise ConfigError(f"A pretrain stage's input `tokenizer` must be of kind tokenizer; found {tokenizer.kind}.")
    return extended(pipeline, name, ModelSize(shape.as_shape(), tokenizer.vocabulary_size, shape.max_positions))
