"""Attention inside documents: a token sees the tokens of its own document up to itself, wherever documents share a row.

Letters: B rows, T tokens a row, H query heads, G key-value heads (each serves H / G query heads), D head width.

An `Attend` is made once a batch and used by every layer. Which one, by what the machine does well:
- CUDA in bfloat16: flash attention over variable lengths, the row boundaries being just more document boundaries;
- CPU in bfloat16, short rows: flash attention forward in bfloat16, backward in float32. PyTorch's backward in bfloat16
  takes 3 times as long at 128 tokens, 1.6 times at 256 (heads 32 wide), and is less exact; at 1,024 it is faster;
- elsewhere: scaled_dot_product_attention under a mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

SHORT_ROW = 256  # tokens

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query (B, T, H, D), key and value (B, T, G, D) -> (B, T, H, D), dtype of the query."""


def document_attention(document_ids: Tensor, dtype: torch.dtype) -> Attend:
    """The Attend of a packed batch. document_ids: (B, T) integers, one number a document within a row; padding -1."""
    if document_ids.device.type == "cuda" and dtype == torch.bfloat16:
        return _variable_length(document_ids)
    if document_ids.device.type == "cpu" and dtype == torch.bfloat16 and document_ids.shape[1] <= SHORT_ROW:
        return _wide_backward(visible(document_ids))
    return _masked(visible(document_ids))


def visible(document_ids: Tensor) -> Tensor:
    """Which key each query sees: (B, T, T) bool. Padding sees padding, so that no row of a softmax is empty."""
    length = document_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return (document_ids[:, :, None] == document_ids[:, None, :]) & causal


def _masked(mask: Tensor) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask[:, None],
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.transpose(1, 2)

    return attend


def _wide_backward(mask: Tensor) -> Attend:
    bias = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill_(~mask, float("-inf"))[:, None]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key, value = (t.repeat_interleave(repeats, dim=2) for t in (key, value))
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        return _WideBackward.apply(query, key, value, bias).transpose(1, 2)

    return attend


class _WideBackward(torch.autograd.Function):
    """Attention in bfloat16 whose gradients are computed in float32; all tensors (B, H, T, D)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, logsumexp = flash(query, key, value, attn_mask=bias)
        ctx.save_for_backward(query, key, value, out, logsumexp, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp, bias = ctx.saved_tensors
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = (t.float() for t in (d_out, query, key, value, out))
        gradients = flash(*wide, logsumexp, 0.0, False, attn_mask=bias.float())
        return *(g.to(query.dtype) for g in gradients), None


def _variable_length(document_ids: Tensor) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    rows, length = document_ids.shape
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    bounds = torch.cat([starts.flatten().nonzero().squeeze(1), starts.new_tensor([starts.numel()], dtype=torch.int64)])
    longest = int(bounds.diff().max())
    bounds = bounds.to(torch.int32)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = varlen_attn(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            bounds,
            bounds,
            longest,
            longest,
            window_size=(-1, 0),
            enable_gqa=query.shape[2] != key.shape[2],
        )
        assert isinstance(out, Tensor)  # of the two that varlen_attn may return, the one without statistics
        return out.unflatten(0, (rows, length))

    return attend
