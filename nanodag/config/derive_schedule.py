"""A stage's model, and what follows from its depth: shape, horizon, batch and learning rates."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from nanodag.config.dial import Shape, flops_per_token, num_parameters, schedule_of, shape_of
from nanodag.config.model_size import ModelSize, known_model
from nanodag.config.section import Filler
from nanodag.config.stage_base import StageBase
from nanodag.errors import ConfigError

if TYPE_CHECKING:
    from nanodag.config.derive_hardware import Derived
    from nanodag.config.kinds.pretrain import PretrainStage
    from nanodag.config.pipeline import Pipeline
    from nanodag.config.supervised import ShapeConfig, SupervisedStage

_Pretrain = TypeVar("_Pretrain", bound="PretrainStage")
_Supervised = TypeVar("_Supervised", bound="SupervisedStage")


def model_of(pipeline: "Pipeline", name: str) -> ModelSize | None:
    """The size of the model that a stage trains or scores, whether its shape was given, derived from its depth, or is
    that of an import that is known; None of another import, and of a stage without a model."""
    stage = began_at(pipeline, name)
    if stage.known_model:
        return known_model(stage.known_model)
    if not _is_from_scratch(stage):
        return None
    shape = shaped(stage, "", {}).shape
    return ModelSize(shape_from(shape), vocabulary_of(pipeline, stage), shape.max_positions)


def width_from_scratch(pipeline: "Pipeline", name: str) -> int:
    """Width of a stage's model where that began at random weights; 0 of an import."""
    source = pretrain_of(pipeline, name)
    return 0 if source is None else int(shaped(source, "", {}).shape.width)


def pretrain_of(pipeline: "Pipeline", name: str) -> "PretrainStage | None":
    """The pretraining stage that a stage's model began in, None when that is an imported checkpoint."""
    stage = began_at(pipeline, name)
    return stage if _is_from_scratch(stage) else None


def began_at(pipeline: "Pipeline", name: str) -> StageBase:
    """The stage that a stage's model began in, through all that trained it."""
    stage = pipeline.stages[name]
    while "model" in stage.inputs:
        stage = pipeline.stages[stage.inputs["model"]]
    return stage


def _is_from_scratch(stage: StageBase) -> "TypeGuard[PretrainStage]":
    return stage.is_from_scratch


def vocabulary_of(pipeline: "Pipeline", stage: "PretrainStage") -> int:
    """The vocabulary of the tokenizer that a pretraining stage takes."""
    tokenizer = pipeline.stages[stage.inputs["tokenizer"]]
    if not tokenizer.vocabulary_size:
        raise ConfigError(f"A pretrain stage's input `tokenizer` must be of kind tokenizer; found {tokenizer.kind}.")
    return tokenizer.vocabulary_size


def shape_from(config: "ShapeConfig") -> Shape:
    """The Shape that a ShapeConfig without `auto` describes."""
    return Shape(**{field.name: getattr(config, field.name) for field in fields(Shape)})


def shaped(stage: _Pretrain, name: str, origins: dict[str, str]) -> _Pretrain:
    """A stage that begins at random weights, with its shape."""
    dial_shape = shape_of(stage.shape.depth)
    fill, sizes = Filler(stage.shape, f"{name}.shape", origins), ("width", "num_heads", "num_kv_heads", "head_width")
    for field in (*sizes, "mlp_width", "tied_embeddings"):
        fill(field, getattr(dial_shape, field), f"depth {stage.shape.depth}")
    updates = fill.updates | _consistent(stage.shape, fill.updates, name, origins)
    shape = stage.shape.model_copy(update=updates)
    if int(shape.num_heads) % int(shape.num_kv_heads):
        raise ConfigError(
            f"{name}.shape.num_kv_heads: {shape.num_kv_heads} does not divide num_heads {shape.num_heads}; "
            "each key-value head serves a whole number of heads."
        )
    if shape.head_width % 2:
        raise ConfigError(
            f"{name}.shape.head_width: {shape.head_width} is odd; rotary positions turn pairs. Set an even one, or a "
            "width that an even number divides."
        )
    if stage.horizon_tokens == 0:
        raise ConfigError(f"{name}.horizon_tokens: 0 trains nothing; give a number, or auto for what the dial says.")
    if stage.sequence_length > shape.max_positions:
        raise ConfigError(
            f"{name}.sequence_length: {stage.sequence_length} is above {name}.shape.max_positions "
            f"{shape.max_positions}; lower the one or raise the other."
        )
    return stage.model_copy(update={"shape": shape})


def _consistent(config: "ShapeConfig", derived: dict[str, Any], name: str, origins: dict[str, str]) -> dict[str, Any]:
    """Heads and MLP for a width that was given by hand."""
    if config.width == "auto" or "width" in derived:
        return {}
    width = int(config.width)
    out: dict[str, Any] = {}
    head_width = int(derived.get("head_width", config.head_width))
    if "head_width" in derived and width % head_width:
        head_width = out["head_width"] = next(h for h in (128, 64, 32, 16, 8, width) if width % h == 0)
    if "num_heads" in derived:
        out["num_heads"] = max(1, width // head_width)
    if "num_kv_heads" in derived:
        out["num_kv_heads"] = out.get("num_heads", config.num_heads)
    if "mlp_width" in derived:
        out["mlp_width"] = -(-8 * width // 3 // 64) * 64
    for field in out:
        origins[f"{name}.shape.{field}"] = f"derived: width {width}"
    return out


def scheduled(stage: _Supervised, derived: "Derived") -> _Supervised:
    """The stage with its horizon, batch and rates."""
    name, pipeline, traits = derived.name, derived.pipeline, stage.optimizer.traits
    fill = Filler(stage, name, derived.origins)
    rates = Filler(stage.optimizer, f"{name}.optimizer", derived.origins)
    if (source := pretrain_of(pipeline, name)) is not None:
        if begins := _is_from_scratch(stage):
            shape = shape_from(stage.shape)
        else:  # the source's own `auto` may come later in the table
            source = shaped(source, stage.inputs["model"], {})
            shape = shape_from(source.shape)
        vocabulary = vocabulary_of(pipeline, source)
        sizes = {"horizon_tokens": stage.horizon_tokens, "batch_tokens": stage.batch_tokens}
        fixed_sizes = {field: int(value) for field, value in sizes.items() if value != "auto"}
        dial = schedule_of(shape, vocabulary, tokens_per_parameter=source.tokens_per_parameter)
        schedule = schedule_of(shape, vocabulary, tokens_per_parameter=source.tokens_per_parameter, **fixed_sizes)
        why = f"depth {shape.depth}, {num_parameters(shape, vocabulary)['total']:,} parameters"
        for field in sizes if begins else ("batch_tokens",):
            fill(field, getattr(schedule, field), why)
            if field in fixed_sizes:
                derived.origins[f"{name}.{field}!"] = f"the dial says {getattr(dial, field):,}"
        # One learning rate for all weights is 20 to 50 times lower than what embeddings alone take beside Muon.
        of_all = round(schedule.matrix_lr / traits.dial_divisor, 6)
        rates("learning_rate", of_all if traits.takes_all else schedule.embedding_lr, why)
        rates("matrix_lr", schedule.matrix_lr / (1 if traits.takes_all else traits.dial_divisor), why)
    if stage.batch_tokens == "auto" and "batch_tokens" not in fill.updates:
        raise ConfigError(f"{name}.batch_tokens: auto needs a pretrain stage above it; give a number.")
    for field in ("learning_rate", "matrix_lr"):
        if getattr(stage.optimizer, field) == "auto" and field not in rates.updates:
            if field == "learning_rate" or not traits.takes_all:
                raise ConfigError(f"{name}.optimizer.{field}: auto needs a pretrain stage above it; give a number.")
            rates.updates[field] = float(stage.optimizer.learning_rate)
    if "horizon_tokens" not in fill.updates:
        fill("horizon_tokens", 0, "0, num_epochs decides")
    return stage.model_copy(update=fill.updates | {"optimizer": stage.optimizer.model_copy(update=rates.updates)})


def check_batch(stage: "SupervisedStage", derived: "Derived") -> None:
    """Raise ConfigError for a step that ranks and micro-batches do not share out evenly."""
    batch, micro, ranks = int(stage.batch_tokens), int(stage.micro_batch_tokens), int(stage.resources.num_ranks)
    if micro % stage.sequence_length or batch % (micro * ranks):
        raise ConfigError(
            f"{derived.name}: batch_tokens {batch} must be a multiple of micro_batch_tokens {micro} x num_ranks {ranks}"
            f", and micro_batch_tokens a multiple of sequence_length {stage.sequence_length}. Set batch_tokens to "
            f"{max(1, round(batch / (stage.sequence_length * ranks))) * stage.sequence_length * ranks}, "
            "micro_batch_tokens to auto."
        )


def facts(pipeline: "Pipeline", name: str) -> dict[str, int]:
    """Parameters and FLOPs a token of a pretraining stage, for `nanodag config` and the report."""
    stage = pipeline.stages[name]
    assert _is_from_scratch(stage)
    shape, vocabulary = shape_from(stage.shape), vocabulary_of(pipeline, stage)
    return {
        **num_parameters(shape, vocabulary),
        "flops_per_token": flops_per_token(shape, vocabulary, stage.sequence_length),
    }
