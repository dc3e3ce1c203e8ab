"""Attention inside documents: a token sees the tokens of its own document up to itself, wherever documents share a row.

Letters: B rows, T tokens a row, H query heads, G key-value heads (each serves H / G query heads), D head width.

An `Attend` is made once a batch and used by every layer. Which one, by what the machine does well:
- CUDA in bfloat16: flash attention over variable lengths, the row boundaries being just more document boundaries;
- CPU: our own code over variable lengths (nanodag.model.cpu_attention), for heads that are a multiple of 16 wide;
- elsewhere: scaled_dot_product_attention under a mask.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanodag.model.cpu_attention import CpuAttention, can_attend, pieces_of_documents

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query (B, T, H, D), key and value (B, T, G, D) -> (B, T, H, D), dtype of the query."""


def document_attention(document_ids: Tensor, dtype: torch.dtype) -> Attend:
    """The Attend of a packed batch. document_ids: (B, T) integers, one number a document within a row; padding -1."""
    if document_ids.device.type == "cuda" and dtype == torch.bfloat16:
        return _variable_length(document_ids)
    if document_ids.device.type == "cpu":
        return _on_cpu(document_ids)
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


def _on_cpu(document_ids: Tensor) -> Attend:
    pieces = pieces_of_documents(document_ids)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not can_attend(query):
            return _masked(visible(document_ids))(query, key, value)
        tokens = (tensor.flatten(0, 1) for tensor in (query, key, value))
        return CpuAttention.apply(*tokens, pieces).view(query.shape)

    return attend


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
