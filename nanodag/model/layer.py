"""A decoder's layer as two functions of tensors around its attention, over four operations that `layer.c` or torch
computes: norm, rotary positions, gate, and the matrix products.

`layer.c`, on CPU cores, makes one walk between the products where torch takes a dozen; torch.compile makes code that is
about as fast, but takes 3 to 10 seconds of a stage to begin. There each value is rounded once, where a chain of torch's
operations rounds after each.

Letters: N tokens, Q of which ask, W width, H query heads, K key-value heads, D head width, F inner width.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nanodag.model import cpu_linear
from nanodag.model.architecture import Architecture, cpu_layer_fits
from nanodag.model.c_library import DTYPES, c_library, fields, on_threads

SOURCE = Path(__file__).with_name("layer.c")
PARTS = 16  # runs of rows, as in layer.c
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function like torch.nn.functional.linear."""


class Operations(NamedTuple):
    """norm: x (N, W), weight (W,), eps -> x itself, and x normed. rotate: x (N, H, D), each head normed where there is
    a gain (D,), then turned by cos and sin (N, 1, D / 2). gate: silu(gate) * up, (N, F) each."""

    norm: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotate: Callable[[Tensor, Tensor | None, Tensor, Tensor, float], Tensor]
    gate: Callable[[Tensor, Tensor], Tensor]
    linear: Linear


def before_attention(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor,
    projections: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    qk_norms: Sequence[Tensor] | None,
    *,
    of: Architecture,
    operations: Operations,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (N, W), cos and sin (N, 1, D / 2) -> x itself, query (N, H, D), key and value (N, K, D). places: (Q,), of which
    alone the query is computed: (Q, H, D)."""
    x, h = operations.norm(x, norm, of.norm_eps)
    query, key, value = (
        operations.linear(inputs, weight, None if biases is None else biases[i]).unflatten(-1, (-1, of.head_dim))
        for i, (inputs, weight) in enumerate(zip((at(h, places), h, h), projections, strict=True))
    )
    of_query, of_key = qk_norms or (None, None)
    query = operations.rotate(query, of_query, at(cos, places), at(sin, places), of.norm_eps)
    return x, query, operations.rotate(key, of_key, cos, sin, of.norm_eps), value


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
    of: Architecture,
    operations: Operations,
) -> Tensor:
    """The rest of a layer: x (N, W) and attended (N, H * D) -> (N, W)."""
    linear = operations.linear
    x, h = operations.norm(linear(attended, output, output_bias).add_(x), norm, of.norm_eps)
    return linear(operations.gate(linear(h, gate, None), linear(h, up, None)), down, None).add_(x)


def at(rows: Tensor, places: Tensor | None) -> Tensor:
    """The rows at some places; without places all."""
    return rows if places is None else rows.index_select(0, places)


class Functions:
    """The layer's two halves, one pair for all layers of a model: over `layer.c` on a CPU where it takes the layer,
    else over torch, compiled or not. compiled may be switched. linear: takes the place of its products, None for none;
    set before the first compiled pass."""

    def __init__(self, *, compiled: bool) -> None:
        self.compiled = compiled
        self.linear: Linear | None = None

    def before(
        self, x: Tensor, cos: Tensor, sin: Tensor, *weights: Any, of: Architecture, places: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`before_attention`, with x as the layer's other half is to take it."""
        operations = self._operations(x, of)
        if operations is None:
            x, query, key, value = self._compiled[0](*_any_length(x, cos, sin), *weights, of=of)
            query = at(query, places)
        else:
            x, query, key, value = before_attention(x, cos, sin, *weights, of=of, operations=operations, places=places)
        return at(x, places), query, key, value

    def after(self, x: Tensor, attended: Tensor, *weights: Any, of: Architecture) -> Tensor:
        """`after_attention`."""
        operations = self._operations(x, of)
        if operations is None:
            return self._compiled[1](*_any_length(x, attended), *weights, of=of)
        return after_attention(x, attended, *weights, of=of, operations=operations)

    def _operations(self, x: Tensor, of: Architecture) -> Operations | None:
        """None where a layer whose input is x (N, W) is compiled."""
        fits = cpu_layer_fits(width=x.shape[1], head_dim=of.head_dim, mlp_width=of.intermediate_size)
        if x.device.type == "cpu" and x.dtype in DTYPES and fits:
            return self._with_linear(OWN)
        return None if self.compiled else self._with_linear(TORCH)

    def _with_linear(self, operations: Operations) -> Operations:
        return operations if self.linear is None else operations._replace(linear=self.linear)

    @cached_property
    def _compiled(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """At first use: torch's compiler takes a second to import."""
        operations = self._with_linear(TORCH)

        def before(*tensors: Any, of: Architecture) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            return before_attention(*tensors, of=of, operations=operations)

        def after(*tensors: Any, of: Architecture) -> Tensor:
            return after_attention(*tensors, of=of, operations=operations)

        return torch.compile(before), torch.compile(after)


def _any_length(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Compile for any number of tokens: stages differ in it, RL's micro-batches too."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensors


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over its root mean square along the last dimension, computed in float32, times weight."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def _rotated(x: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    first, second = (x if gain is None else rms_norm(x, gain, eps)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class RowNorm(torch.autograd.Function):
    """x (N, W) and the norm's weight (W,) -> x itself, and x over its root mean square, times the weight.

    x passes through, so that the backward pass adds both its gradients in one walk.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        y, scales = torch.empty_like(x), torch.empty(len(x))
        _run("norm", x, eps, weight=weight, y=y, scales=scales)
        ctx.save_for_backward(x, weight, scales)
        ctx.eps = eps
        return x, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_passed: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        d_x, d_weights = torch.empty_like(x), torch.empty(PARTS, x.shape[1])
        tensors = {"d_y": d_y.contiguous(), "added": d_passed.contiguous(), "d_x": d_x, "d_weights": d_weights}
        _run("norm_back", x, ctx.eps, weight=weight, scales=scales, **tensors)
        return d_x, d_weights.sum(0).to(weight.dtype), None


class Rotated(torch.autograd.Function):
    """x (N, H, D), each head normed where there is a gain (D,), then turned by cos and sin (N, 1, D / 2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        cos, sin = cos.contiguous(), sin.contiguous()
        _run("rotate", x, eps, weight=gain, cos=cos, sin=sin, y=y)
        ctx.save_for_backward(x, gain, cos, sin)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, cos, sin = ctx.saved_tensors
        d_x, d_gains = torch.empty_like(x), torch.empty(PARTS, x.shape[2])
        tensors = {"d_y": d_y.contiguous(), "d_x": d_x, "d_weights": d_gains}
        _run("rotate_back", x, ctx.eps, weight=gain, cos=cos, sin=sin, **tensors)
        return d_x, None if gain is None else d_gains.sum(0).to(gain.dtype), None, None, None


class Gated(torch.autograd.Function):
    """silu(gate) * up, (N, F) each."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        _run("gate", gate, up=up, y=y)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate)
        _run("gate_back", gate, up=up, d_y=d_y.contiguous(), d_x=d_gate, d_up=d_up)
        return d_gate, d_up


class _Walk(Structure):
    _fields_ = [
        *fields(c_int64, "num_rows num_heads width is_bf16"),
        ("eps", c_double),
        *fields(c_void_p, "x weight cos sin up d_y added y d_x d_up scales d_weights"),
    ]


SUMS = ("scales", "d_weights")  # float32 whatever the others are


def _run(function: str, x: Tensor, eps: float = 0.0, **tensors: Tensor | None) -> None:
    """Call a function of `layer.c`. x (N, W) or (N, H, D). C reads all tensors without gaps and as one type."""
    num_rows, *heads, width = x.shape
    is_bf16 = x.dtype == torch.bfloat16
    arguments = _Walk(num_rows=num_rows, num_heads=math.prod(heads), width=width, is_bf16=is_bf16, eps=eps)
    for name, tensor in {"x": x, **tensors}.items():
        if tensor is not None:
            assert tensor.is_contiguous() and tensor.dtype == (torch.float32 if name in SUMS else x.dtype), name
            setattr(arguments, name, tensor.data_ptr())
    call: Callable[..., None] = getattr(_library(), function)
    reference = ctypes.byref(arguments)
    on_threads(lambda thread, count: call(reference, PARTS * thread // count, PARTS * (thread + 1) // count))


_NAMES = ("norm", "norm_back", "rotate", "rotate_back", "gate", "gate_back")
_TYPES = ([c_void_p, c_int64, c_int64], None)
_library = cache(partial(c_library, SOURCE, "the layers of training on a CPU", dict.fromkeys(_NAMES, _TYPES)))


TORCH = Operations(
    norm=lambda x, weight, eps: (x, rms_norm(x, weight, eps)),
    rotate=_rotated,
    gate=lambda gate, up: functional.silu(gate) * up,
    linear=functional.linear,
)
OWN = Operations(RowNorm.apply, Rotated.apply, Gated.apply, cpu_linear.linear)
