"""Muon: a matrix's update is the orthogonal matrix nearest to its momentum.

Letters: K matrices of one shape, R rows, C columns, R <= C.

Source: Keller Jordan et al., https://kellerjordan.github.io/posts/muon; the step size is scaled by
sqrt(max(1, rows / columns)), as there.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from nanodag.config.supervised import OptimizerConfig
from nanodag.registry import entry, optimizer_named
from nanodag.train.optimizer import Held, Segment
from nanodag.train.shares import in_buckets

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
MOMENTUM_START = 0.85  # where a warm-up begins, as in the source above
BUCKET_ELEMENTS = optimizer_named("muon").work_elements  # orthogonalised or exchanged at once: 128 MiB in bfloat16

Shapes = Mapping[str, tuple[int, ...]]


# Five copies of what is orthogonalised at once: gathered, stacked, the iterate twice, the products.
@entry("optimizer", "muon", states=1, work_copies=5, work_elements=67_108_864)
class Muon:
    """Muon for matrices in the layers, with Nesterov's momentum; AdamW for embeddings, head, norms and biases."""

    def __init__(self, config: OptimizerConfig, held: Held) -> None:
        self._config, self._held = config, held
        self.rows: list[tuple[Segment, Tensor]] = []

    def step(self, gradients: Sequence[Tensor], *, rate: float, num_updates: int) -> None:
        """Update the weights; gradients are written over."""
        config, held = self._config, self._held
        momentum = momentum_of(num_updates, config)
        slices = [gradients[run.flat][run.where] for run in held.runs]
        if held.runs:
            momenta = [run.states[0] for run in held.runs]
            torch._foreach_lerp_(momenta, slices, 1 - momentum)
            torch._foreach_lerp_(slices, momenta, momentum)  # Nesterov's look ahead
        pieces = [(segment, gradients[segment.flat][segment.where]) for segment in held.segments]
        muon_updates(held.shapes, pieces, sharded=held.sharded, dtype=held.dtype)
        self._adapt(pieces)
        weights = [run.weights for run in held.runs]
        if held.runs and config.weight_decay:
            torch._foreach_mul_(weights, 1 - rate * config.weight_decay)
        if held.runs:
            torch._foreach_add_(weights, slices, alpha=-rate)

    def _adapt(self, pieces: Sequence[tuple[Segment, Tensor]]) -> None:
        """Change the updates, which are in pieces, in place."""


def momentum_of(num_updates: int, config: OptimizerConfig) -> float:
    """Momentum of the update after num_updates: from MOMENTUM_START in a line to config.momentum over the warm-up."""
    left = max(0.0, 1.0 - num_updates / config.momentum_warmup) if config.momentum_warmup else 0.0
    return config.momentum - (config.momentum - MOMENTUM_START) * left


def device_of(pieces: Sequence[tuple[Segment, Tensor]]) -> torch.device:
    """Device that a rank talks on, also one without pieces."""
    if pieces:
        return pieces[0][1].device
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def orthogonalised(matrices: Tensor) -> Tensor:
    """Newton-Schulz iteration: the singular vectors of each matrix, its singular values brought to between 0.7 and 1.2.

    matrices: (K, R, C) with R <= C, float32 or bfloat16. An all-zero matrix stays zero.
    """
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def muon_updates(
    shapes: Shapes, pieces: Sequence[tuple[Segment, Tensor]], *, sharded: bool, dtype: torch.dtype
) -> None:
    """Replace each piece of a momentum, in place, by the same piece of its matrix's update.

    shapes: every matrix of the model, in the same order on every rank. pieces: what this rank holds of them, 1-D
    float32; whole matrices unless sharded. dtype: of the iteration and of the exchange.
    """
    held: dict[str, list[tuple[Segment, Tensor]]] = defaultdict(list)
    for segment, piece in pieces:
        held[segment.name].append((segment, piece))
    if sharded:
        device = device_of(pieces)
        for bucket in _buckets(list(shapes), shapes):
            _exchange_and_update(bucket, shapes, held, dtype, device)
        return
    views = {name: held[name][0][1].view(shapes[name]) for name in shapes}
    for name, update in _updates(views, dtype):
        views[name].copy_(update).mul_(_scale(shapes[name]))


def _scale(shape: tuple[int, ...]) -> float:
    return math.sqrt(max(1.0, shape[0] / shape[1]))


def _updates(matrices: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Orthogonalised matrices by name, those of one shape computed together."""
    by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
    shapes = {name: tuple(matrix.shape) for name, matrix in matrices.items()}
    for name, shape in shapes.items():
        by_shape[shape].append(name)
    for (rows, columns), names in by_shape.items():
        upright = rows > columns
        for bucket in _buckets(names, shapes):
            stacked = torch.stack([matrices[n].mT if upright else matrices[n] for n in bucket]).to(dtype)
            for name, update in zip(bucket, orthogonalised(stacked), strict=True):
                yield name, update.mT if upright else update


def _exchange_and_update(
    names: list[str],
    shapes: Shapes,
    held: Mapping[str, list[tuple[Segment, Tensor]]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Update a bucket: every rank gets all its matrices, updates a share of them, gets all updates. Both exchanges are
    sums in which each element has one term that is not zero, so they are exact."""
    sizes = [math.prod(shapes[name]) for name in names]
    whole = torch.zeros(sum(sizes), dtype=dtype, device=device)
    flats = dict(zip(names, whole.split(sizes), strict=True))
    for name in names:
        for segment, piece in held[name]:
            flats[name][segment.offset : segment.offset + segment.length] = piece
    dist.all_reduce(whole)
    updates = torch.zeros_like(whole)
    flat_updates = dict(zip(names, updates.split(sizes), strict=True))
    mine = names[dist.get_rank() :: dist.get_world_size()]
    for name, update in _updates({name: flats[name].view(shapes[name]) for name in mine}, dtype):
        flat_updates[name].view(shapes[name]).copy_(update)
    dist.all_reduce(updates)
    for name in names:
        for segment, piece in held[name]:
            update = flat_updates[name][segment.offset : segment.offset + segment.length]
            piece.copy_(update).mul_(_scale(shapes[name]))


def _buckets(names: Sequence[str], shapes: Shapes) -> Iterator[list[str]]:
    return in_buckets(names, {name: math.prod(shapes[name]) for name in names}, BUCKET_ELEMENTS)
