"""Size of the model in a folder, as memory and work are planned by it. No torch."""

from dataclasses import replace
from pathlib import Path

from nanodag.config.dial import Shape
from nanodag.config.model_size import ModelSize
from nanodag.model.architecture import Architecture
from nanodag.model.headers import matrix_parameters, num_elements, tensor_shapes


def size_of(folder: Path, of: Architecture) -> ModelSize:
    """A model's size. One that transformers computes has the inner width with which our layers would have as many
    parameters, and for FLOPs as many as a token is multiplied with."""
    shape = Shape(
        depth=of.num_layers,
        width=of.hidden_size,
        num_heads=of.num_heads,
        num_kv_heads=of.num_kv_heads,
        head_width=of.head_dim,
        mlp_width=of.intermediate_size,
        tied_embeddings=of.tied,
    )
    size = ModelSize(shape, of.vocab_size, of.max_positions, of.window)
    if of.model_code == "own":
        return size
    shapes = tensor_shapes(folder)
    is_tied = "lm_head.weight" not in shapes
    total, active = num_elements(shapes), matrix_parameters(folder)
    each = 3 * of.num_layers * of.hidden_size  # parameters of one more of inner width
    size = replace(size, shape=replace(shape, tied_embeddings=is_tied, mlp_width=0))
    active_width = max(1, round((active - of.vocab_size * of.hidden_size - size.parameters["matrices"]) / each))
    width = max(1, round((total - size.total) / each))
    return replace(size, shape=replace(size.shape, mlp_width=width), active_mlp_width=min(width, active_width))
