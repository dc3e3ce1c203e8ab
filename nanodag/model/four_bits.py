"""Weights in 4 bits, NormalFloat: each number is one of 16 values times the scale of its block of 64.

Source: QLoRA, arXiv:2305.14314; the values are those of its appendix E. Scales are rounded to bfloat16 first, so that a
model in any precision holds the same weights; they are not quantized again.
"""

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BLOCK = 64


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight of any shape with N numbers -> codes, two in a byte, (ceil(N / 64) * 32,) uint8, and scales,
    (ceil(N / 64),) float32. The values are the nearest; a block of zeros stays one."""
    flat = weight.detach().float().flatten()
    blocks = functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).bfloat16().float()
    values = torch.tensor(VALUES, device=weight.device)
    shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(shares, (values[1:] + values[:-1]) / 2, out_int32=True).view(-1, 2)
    return (codes[:, 0] * 16 + codes[:, 1]).to(torch.uint8), scales


def restored(codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The weight, (shape), that `quantized` made these of."""
    blocks = _pairs(codes.device)[codes.int()].view(-1, BLOCK)
    blocks.mul_(scales.float()[:, None])
    return blocks.flatten()[: math.prod(shape)].view(shape).to(dtype)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Values of the two codes in each byte, (256, 2) float32."""
    values = torch.tensor(VALUES, device=device)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], 1)
