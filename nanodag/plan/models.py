"""The model that a stage begins at or trains, as far as it is known before any of it was built."""

from pathlib import Path
from typing import Literal

from nanodag.config import Pipeline
from nanodag.config.derive import began_at
from nanodag.config.derive import model_of as derived_model_of
from nanodag.config.dial import Shape
from nanodag.config.kinds.import_model import ImportStage
from nanodag.config.model_size import ModelSize
from nanodag.config.supervised import ChatStage
from nanodag.errors import BadRequest, ConfigError, SourceError
from nanodag.model.architecture import read_checkpoint
from nanodag.model.import_model import local_files

Habit = Literal["data", "half", "full"]
"""How long a model's answers are: as those of its data, half of what they may be, or all of it."""


def habit_of(pipeline: Pipeline, name: str) -> Habit:
    """How long the answers of a stage's model are: as its data's once it was trained on conversations here, to the last
    token where it has seen text alone, and half of what they may be where it is an import, of which nobody knows."""
    stage = pipeline.stages[name]
    while "model" in stage.inputs:
        stage = pipeline.stages[stage.inputs["model"]]
        if isinstance(stage, ChatStage):
            return "data"
    return "half" if isinstance(stage, ImportStage) else "full"


def model_of(pipeline: Pipeline, name: str) -> ModelSize | None:
    """The model of a stage, or of the one that it takes it from; None where that is not known, as of an import from
    the hub that nobody has named yet."""
    known, stage = derived_model_of(pipeline, name), began_at(pipeline, name)
    if not isinstance(stage, ImportStage):
        return known
    mirror = None if pipeline.mirror == "none" else Path(pipeline.mirror)
    try:
        files = local_files(stage.model, mirror)
    except (BadRequest, SourceError):  # the check beforehand says what is wrong with it
        return None
    if not files:
        return known
    try:
        return _read(files[0].parent)
    except BadRequest as error:
        began = next(name for name, other in pipeline.stages.items() if other is stage)
        raise ConfigError(f"{began}.model={stage.model} cannot be taken: {error}") from error


def _read(folder: Path) -> ModelSize:
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
    return ModelSize(shape, found.vocab_size, found.max_positions)
