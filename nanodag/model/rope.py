"""Rotary position embedding's frequencies, which the model and the embedded sampler share."""

import math

import torch
from torch import Tensor

from nanodag.model.architecture import Rope


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """(D / 2,) float32: radians a position.

    Source: RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071; transformers, modeling_rope_utils.py.
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
    if rope.kind == "yarn":  # those that turn often in the original context stay, slow ones are stretched
        first, last = (
            head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
            for turns in (rope.beta_fast, rope.beta_slow)
        )
        low, high = max(math.floor(first), 0), min(math.ceil(last), head_dim - 1)
        place = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        blend = ((place - low) / (high - low or 0.001)).clamp(0, 1)
        return frequencies / rope.factor * blend + frequencies * (1 - blend)
    return frequencies


def rope_scale(rope: Rope) -> float:
    """Factor of sines and cosines: 1.0 but for YaRN (arXiv:2309.00071, section 3.4)."""
    return 0.1 * math.log(rope.factor) + 1.0 if rope.kind == "yarn" and rope.factor > 1 else 1.0
