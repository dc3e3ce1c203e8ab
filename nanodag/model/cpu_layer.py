"""A layer on CPU cores: norms, rotary positions and the gate, all between the matrix products, by `layer.c`.

torch.compile makes code that is about as fast, but takes 3 to 10 seconds of a stage to begin. Each value is rounded
once here, where a chain of torch's operations rounds after each. Arguments and results are those of the functions of
nanodag.model.decoder.

Letters: N tokens, Q of which ask, W width, H query heads, G key-value heads, D head width, F inner width.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanodag.model.architecture import cpu_layer_fits
from nanodag.model.c_library import c_library
from nanodag.model.core_threads import on_threads
from nanodag.model.cpu_linear import linear

if TYPE_CHECKING:
    from nanodag.model.decoder import Heads

SOURCE = Path(__file__).with_name("layer.c")
DTYPES = (torch.float32, torch.bfloat16)
PARTS = 16  # runs of rows, as in layer.c


def can_run(x: Tensor, heads: "Heads") -> bool:
    """Whether the functions here take a layer whose input is x (N, W)."""
    fits = cpu_layer_fits(width=x.shape[1], head_dim=heads.head_dim, mlp_width=heads.mlp_width)
    return x.device.type == "cpu" and x.dtype in DTYPES and fits


def before_attention(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor,
    projections: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    qk_norms: Sequence[Tensor] | None,
    *,
    heads: "Heads",
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (N, W), cos and sin (N, 1, D / 2) -> x itself, query (N, H, D), key and value (N, G, D). places: (Q,), of which
    alone the query is wanted: (Q, H, D)."""
    x, h = RowNorm.apply(x, norm, heads.norm_eps)
    of_places = (t if places is None else t.index_select(0, places) for t in (h, cos, sin))
    h_of_query, cos_of_query, sin_of_query = of_places
    query, key, value = (
        linear(inputs, weight, None if biases is None else biases[i]).unflatten(-1, (-1, heads.head_dim))
        for i, (inputs, weight) in enumerate(zip((h_of_query, h, h), projections, strict=True))
    )
    of_query, of_key = qk_norms or (None, None)
    query = Rotated.apply(query, of_query, cos_of_query, sin_of_query, heads.norm_eps)
    return x, query, Rotated.apply(key, of_key, cos, sin, heads.norm_eps), value


def after_attention(
    x: Tensor,
    attended: Tensor,
    output: Tensor,
    output_bias: Tensor | None,
    norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    heads: "Heads",
) -> Tensor:
    """The rest of a layer: x (N, W) and attended (N, H * D) -> (N, W)."""
    x, h = RowNorm.apply(linear(attended, output, output_bias).add_(x), norm, heads.norm_eps)
    return linear(Gated.apply(linear(h, gate), linear(h, up)), down).add_(x)


class RowNorm(torch.autograd.Function):
    """x (N, W) and the norm's weight (W,) -> x itself, and x over its root mean square, times the weight.

    x passes through, so that the backward pass adds both its gradients in one walk.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        y, scales = torch.empty_like(x), torch.empty(len(x))
        _run("norm", _of_norm(x, eps, weight=weight, y=y, scales=scales))
        ctx.save_for_backward(x, weight, scales)
        ctx.eps = eps
        return x, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_passed: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        d_x, d_weights = torch.empty_like(x), torch.empty(PARTS, x.shape[1])
        tensors = {"d_y": d_y.contiguous(), "added": d_passed.contiguous(), "d_x": d_x, "d_weights": d_weights}
        _run("norm_back", _of_norm(x, ctx.eps, weight=weight, scales=scales, **tensors))
        return d_x, d_weights.sum(0).to(weight.dtype), None


class Rotated(torch.autograd.Function):
    """x (N, H, D), each head normed where there is a gain (D,), then turned by cos and sin (N, 1, D / 2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        cos, sin = cos.contiguous(), sin.contiguous()
        _run("rotate", _of_rotation(x, eps, gain=gain, cos=cos, sin=sin, y=y))
        ctx.save_for_backward(x, gain, cos, sin)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, cos, sin = ctx.saved_tensors
        d_x, d_gains = torch.empty_like(x), torch.empty(PARTS, x.shape[2])
        tensors = {"d_y": d_y.contiguous(), "d_x": d_x, "d_gains": d_gains}
        _run("rotate_back", _of_rotation(x, ctx.eps, gain=gain, cos=cos, sin=sin, **tensors))
        return d_x, None if gain is None else d_gains.sum(0).to(gain.dtype), None, None, None


class Gated(torch.autograd.Function):
    """silu(gate) * up, (N, F) each."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        _run("gate", _of_gate(gate, up=up, y=y))
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate)
        _run("gate_back", _of_gate(gate, up=up, d_y=d_y.contiguous(), d_gate=d_gate, d_up=d_up))
        return d_gate, d_up


class _Norm(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "width", "is_bf16")),
        ("eps", c_double),
        *((name, c_void_p) for name in ("x", "weight", "d_y", "added", "y", "d_x", "scales", "d_weights")),
    ]


class _Rotation(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "num_heads", "head_dim", "is_bf16")),
        ("eps", c_double),
        *((name, c_void_p) for name in ("x", "gain", "cos", "sin", "d_y", "y", "d_x", "d_gains")),
    ]


class _Gate(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("count", "is_bf16")),
        *((name, c_void_p) for name in ("gate", "up", "d_y", "y", "d_gate", "d_up")),
    ]


def _of_norm(x: Tensor, eps: float, **tensors: Tensor) -> _Norm:
    sizes = {"num_rows": x.shape[0], "width": x.shape[1], "is_bf16": x.dtype == torch.bfloat16}
    return _Norm(**sizes, eps=eps, **_addresses(x.dtype, x=x, **tensors))


def _of_rotation(x: Tensor, eps: float, **tensors: Tensor | None) -> _Rotation:
    sizes = dict(zip(("num_rows", "num_heads", "head_dim"), x.shape, strict=True), is_bf16=x.dtype == torch.bfloat16)
    return _Rotation(**sizes, eps=eps, **_addresses(x.dtype, x=x, **tensors))


def _of_gate(gate: Tensor, **tensors: Tensor) -> _Gate:
    return _Gate(
        count=gate.numel(), is_bf16=gate.dtype == torch.bfloat16, **_addresses(gate.dtype, gate=gate, **tensors)
    )


SUMS = ("scales", "d_weights", "d_gains")  # float32 whatever the others are


def _addresses(dtype: torch.dtype, **tensors: Tensor | None) -> dict[str, int]:
    """Where the tensors lie. C reads all of them without gaps and as one type."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        assert tensor.is_contiguous() and tensor.dtype == (torch.float32 if name in SUMS else dtype), name
    return {name: tensor.data_ptr() for name, tensor in given.items()}


def _run(function: str, arguments: Structure) -> None:
    call: Callable[..., None] = getattr(_library(), function)
    reference = ctypes.byref(arguments)
    on_threads(lambda thread, count: call(reference, PARTS * thread // count, PARTS * (thread + 1) // count))


@cache
def _library() -> ctypes.CDLL:
    library = c_library(SOURCE, "the layers of training on a CPU")
    for name in ("norm", "norm_back", "rotate", "rotate_back", "gate", "gate_back"):
        function = getattr(library, name)
        function.argtypes, function.restype = [c_void_p, c_int64, c_int64], None
    return library
