"""Numbers of rows that give the same bits in every row on this machine.

A matmul library picks its kernel by the shape, and may treat rows at the edge of a tile differently; nothing promises
that row 3 of 64 gets the same bits as row 0 of 1. Deterministic mode needs that, so it is tried: one sample is put into
every slot and decoded at every size. Kernels are chosen by shape and never by values, so what holds for some dense
random weights holds for all.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from nanodag.errors import SamplerError
from nanodag.sampler.model import SamplerModel
from nanodag.sampler.sizes import ATTENTION_CHUNK

log = logging.getLogger(__name__)


def invariant_row_sizes(model: SamplerModel) -> tuple[int, ...]:
    """Sizes, ascending, at which every row has the same bits, and the same at every size and every length read.

    The largest size decides: a smaller size that differs from it is left out. If rows differ among themselves at the
    full number of slots, the next smaller size is tried. Size 1 alone is always invariant.

    The model's slots are overwritten; call this before any request. Raises SamplerError if no size will do.
    """
    candidates = [size for size in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256) if size < model.num_slots]
    candidates.append(model.num_slots)
    with _random_weights(model):
        for largest in reversed(candidates):
            reference = _bits(model, largest)
            if reference is not None:
                break
        if reference is None:
            raise SamplerError(
                "deterministic mode cannot work here: one row alone differs with the length that is read"
            )
        smaller = [size for size in candidates if size < largest and _equal(_bits(model, size), reference)]
    if largest < model.num_slots:
        log.warning("deterministic mode uses %d of %d slots: more rows differ in bits here", largest, model.num_slots)
    return (*smaller, largest)


@contextmanager
def _random_weights(model: SamplerModel) -> Iterator[None]:
    """Try with dense random weights: a freshly initialised model has zero matrices, which hide how sums are ordered."""
    generator = torch.Generator(device=model.device).manual_seed(0)
    kept = [tensor.clone() for tensor in model.weights.tensors()]
    try:
        for tensor in model.weights.tensors():
            tensor.uniform_(-1.0, 1.0, generator=generator).div_(tensor.shape[0] ** 0.5)
        yield
    finally:
        for tensor, original in zip(model.weights.tensors(), kept, strict=True):
            tensor.copy_(original)


def _bits(model: SamplerModel, rows: int) -> list[torch.Tensor] | None:
    """Results of every row; None if rows differ, or differ with the length read."""
    prompt = np.random.default_rng(0).integers(0, model.architecture.vocab_size, size=min(24, model.capacity - 1))
    tokens, positions = np.full(rows, int(prompt[0])), np.full(rows, len(prompt))
    seen: list[torch.Tensor] | None = None
    for length in (ATTENTION_CHUNK * count for count in (1, 2, 3, 8) if ATTENTION_CHUNK * count <= model.capacity):
        model.prefill([prompt], [list(range(model.num_slots))])
        model.decode(tokens, positions, length)
        scores = model.logits(rows, None).clone()
        results = [model.buffers.hidden[:rows].clone(), scores, torch.softmax(scores, dim=-1)]
        first = [tensor[0] for tensor in results]
        is_uneven = any(not torch.equal(tensor, tensor[:1].expand_as(tensor)) for tensor in results)
        if is_uneven or (seen is not None and not _equal(first, seen)):
            return None
        seen = first
    return seen


def _equal(one: list[torch.Tensor] | None, other: list[torch.Tensor] | None) -> bool:
    if one is None or other is None:
        return False
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
