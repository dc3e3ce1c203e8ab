"""Rotary position embedding's frequencies, which the model and the embedded sampler share."""

import torch
from torch import Tensor

from nanodag.model.architecture import Rope


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """(D / 2,) float32: radians a position.

    Source: RoFormer, arXiv:2104.09864; transformers, modeling_rope_utils.py (default, linear, llama3).
    """
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim))
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * torch.pi / frequencies
        blend = (rope.original_positions / wavelengths - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blend = blend.clamp(0, 1)
        return (1 - blend) * frequencies / rope.factor + blend * frequencies
    return frequencies
