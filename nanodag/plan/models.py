"""The model that a stage begins at or trains, as far as it is known before any of it was built."""

from dataclasses import dataclass
from pathlib import Path

from nanodag.config import Pipeline
from nanodag.config.derive import model_of as derived_model_of
from nanodag.config.derive import pretrain_of
from nanodag.config.dial import Shape, flops_per_token, num_parameters
from nanodag.config.kinds.import_model import ImportStage
from nanodag.config.known_models import known_positions
from nanodag.errors import BadRequest, SourceError
from nanodag.model.architecture import read_checkpoint
from nanodag.model.import_model import local_files


@dataclass(frozen=True)
class PlannedModel:
    """A model's shape. max_positions: tokens of the longest sequence that it is declared for."""

    shape: Shape
    vocabulary: int
    max_positions: int

    @property
    def parameters(self) -> dict[str, int]:
        """By part, as nanodag.config.dial counts them."""
        return num_parameters(self.shape, self.vocabulary)

    @property
    def total(self) -> int:
        """All parameters."""
        return self.parameters["total"]

    def training_flops(self, length: int) -> int:
        """FLOPs of forward and backward for a token of rows of a length."""
        return flops_per_token(self.shape, self.vocabulary, length)

    def forward_flops(self, length: int) -> float:
        """FLOPs of a forward pass for a token that sees so many before it on average."""
        return self.training_flops(length) / 3


def model_of(pipeline: Pipeline, name: str) -> PlannedModel | None:
    """The model of a stage, or of the one that it takes it from; None where that is not known, as of an import from
    the hub that nobody has named yet."""
    known, source = derived_model_of(pipeline, name), pretrain_of(pipeline, name)
    if known is not None and source is not None:
        return PlannedModel(*known, source.shape.max_positions)
    stage = pipeline.stages[name]
    while "model" in stage.inputs:
        stage = pipeline.stages[stage.inputs["model"]]
    if not isinstance(stage, ImportStage):
        return None
    mirror = None if pipeline.mirror == "none" else Path(pipeline.mirror)
    try:
        files = local_files(stage.model, mirror)
        if files:
            return _read(files[0].parent)
    except (BadRequest, SourceError):  # the check beforehand says what is wrong with it
        return None
    return PlannedModel(*known, known_positions(stage.model)) if known is not None else None


def _read(folder: Path) -> PlannedModel:
    found = read_checkpoint(folder).architecture
    shape = Shape(
        depth=found.num_layers,
        width=found.hidden_size,
        num_heads=found.num_heads,
        num_kv_heads=found.num_kv_heads,
        head_width=found.head_dim,
        mlp_width=found.intermediate_size,
        tied_embeddings=found.tied,
    )
    return PlannedModel(shape, found.vocab_size, found.max_positions)
