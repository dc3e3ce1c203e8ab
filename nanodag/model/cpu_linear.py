"""Matrix products in float32 on a CPU by oneDNN, where torch takes MKL, which holds back on AMD's processors.

Products of a layer on an AMD EPYC of the Zen 5 kind, GFLOP a CPU-second: 230 to 250 against 100 to 110 with AVX-512,
115 to 130 against 95 to 113 as on AVX2. In bfloat16 torch takes oneDNN anyway.
"""

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nanodag.host.processor import SHAPE_CACHES

for variable, size in SHAPE_CACHES.items():  # read at the first product
    os.environ.setdefault(variable, size)


def times_transposed(x: Tensor, matrix: Tensor) -> Tensor:
    """x (N, K) times the transpose of a matrix (M, K): (N, M). Either may be transposed in memory."""
    is_ours = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() and torch.backends.mkldnn.is_available()
    if not is_ours:
        return x @ matrix.T
    # What torch's own compiler calls for a linear layer on a CPU.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix, None, "none", [], "")
    return product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute torch.nn.functional.linear of x (N, K) and weight (M, K) on a CPU."""
    if x.dtype != torch.float32:
        return functional.linear(x, weight, bias)
    product: Tensor = _Linear.apply(x, weight)
    return product if bias is None else product + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times_transposed(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_x = times_transposed(d_y, weight.T) if ctx.needs_input_grad[0] else None
        return d_x, times_transposed(d_y.T, x.T) if ctx.needs_input_grad[1] else None
