"""The one dial: what a model's depth says about its shape, horizon, batch and learning rates.

Every number can be overridden in pipeline.yaml; what the dial would have said is recorded beside it. All are those of
the sources, none was measured on runs of ours: `nanodag scale` says which ratio of rule 4 these give.

Rules and sources:
1. Width is 64 a layer, in whole heads. Heads are 128 wide from width 512 on, 32 or 64 below (a model of one 128-wide
   head attends to one thing at a time).                                        karpathy/nanochat scripts/base_train.py
2. SwiGLU's inner width is 8/3 of the width, up to a multiple of 64: the parameters of a 4x GELU MLP.  arXiv:2002.05202
3. Embeddings are tied below depth 12, where the vocabulary would outweigh the layers: our choice.
4. Horizon: 10.5 tokens for each parameter in matrices and output head (compute-optimal for this family of recipes; a
   Chinchilla ratio of 20 counts all parameters and AdamW).             karpathy/nanochat dev/LOG.md; arXiv:2203.15556
5. Batch grows with horizon^0.383 from 2^19 tokens at depth 12, to the nearest power of two.            arXiv:2505.13738
6. Learning rates grow with sqrt(batch / 2^19).                                                         arXiv:2405.13698
7. AdamW's rates, for embeddings and head, shrink with sqrt(768 / width).                               arXiv:2203.03466
"""

import math
from dataclasses import dataclass

REFERENCE_DEPTH = 12
REFERENCE_BATCH_TOKENS = 2**19


@dataclass(frozen=True)
class Shape:
    """A Qwen3-type model's shape. Widths in elements."""

    depth: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    mlp_width: int
    tied_embeddings: bool


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """horizon_tokens and batch_tokens in tokens; learning rates as optimizers take them."""

    horizon_tokens: int
    batch_tokens: int
    matrix_lr: float
    embedding_lr: float


def shape_of(depth: int) -> Shape:
    """The shape that the dial gives for a depth >= 1."""
    width = 64 * depth
    head_width = 128 if width >= 512 else 64 if width >= 256 else 32
    width = -(-width // head_width) * head_width
    return Shape(
        depth=depth,
        width=width,
        num_heads=width // head_width,
        num_kv_heads=width // head_width,
        head_width=head_width,
        mlp_width=-(-8 * width // 3 // 64) * 64,
        tied_embeddings=depth < REFERENCE_DEPTH,
    )


def num_parameters(shape: Shape, vocabulary: int) -> dict[str, int]:
    """Parameters by part: `embedding`, `head` (0 when tied), `matrices`, `norms`, `total`."""
    heads = shape.num_heads * shape.head_width
    kv_heads = shape.num_kv_heads * shape.head_width
    matrices = shape.depth * (2 * shape.width * heads + 2 * shape.width * kv_heads + 3 * shape.width * shape.mlp_width)
    norms = shape.depth * (2 * shape.width + 2 * shape.head_width) + shape.width
    embedding = vocabulary * shape.width
    head = 0 if shape.tied_embeddings else embedding
    parts = {"embedding": embedding, "head": head, "matrices": matrices, "norms": norms}
    return parts | {"total": sum(parts.values())}


def flops_per_token(shape: Shape, vocabulary: int, sequence_length: int) -> int:
    """FLOPs of forward and backward for one trained token: 6 a matrix parameter (the head counts, tied or not), and
    12 * layers * heads * head width * sequence length of attention, halved because it is causal.

    Source: PaLM, arXiv:2204.02311, appendix B.
    """
    parts = num_parameters(shape, vocabulary)
    head = vocabulary * shape.width
    attention = 6 * shape.depth * shape.num_heads * shape.head_width * sequence_length
    return 6 * (parts["matrices"] + head) + attention


def schedule_of(
    shape: Shape,
    vocabulary: int,
    *,
    tokens_per_parameter: float,
    horizon_tokens: int | None = None,
    batch_tokens: int | None = None,
) -> Hyperparameters:
    """Horizon, batch and learning rates for a shape; what the config already fixed is taken as given."""

    def horizon(of: Shape) -> int:
        parts = num_parameters(of, vocabulary)
        return int(tokens_per_parameter * (parts["matrices"] + vocabulary * of.width))

    horizon_tokens = horizon_tokens or horizon(shape)
    if batch_tokens is None:
        ratio = horizon_tokens / horizon(shape_of(REFERENCE_DEPTH))
        batch_tokens = 2 ** round(math.log2(REFERENCE_BATCH_TOKENS * ratio**0.383))
    scale = math.sqrt(batch_tokens / REFERENCE_BATCH_TOKENS)
    return Hyperparameters(
        horizon_tokens=horizon_tokens,
        batch_tokens=batch_tokens,
        matrix_lr=round(0.02 * scale, 6),
        embedding_lr=round(0.02 * scale * math.sqrt(768 / shape.width), 6),
    )
