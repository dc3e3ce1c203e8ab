"""Attention of responses to their prompts and to themselves apart, on a CPU, put together by their normalisers.

So neither part needs a mask of queries by keys: a prompt's padding is hidden by a number a key, and a response from its
own future by causality. With the normaliser and the output of both together, the kernel's backward pass over either
part gives that part's share of the gradients exactly: they need nothing else of the other part.

Source: ring attention, arXiv:2310.01889, whose blocks are put together so.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class SplitAttention(torch.autograd.Function):
    """query, own_key, own_value (R, H, L, D); prompt_key, prompt_value (R, H, P, D); bias (R, 1, 1, P) in the query's
    dtype, -inf for padding -> (R, H, L, D)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        prompt_key: Tensor,
        prompt_value: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        bias: Tensor,
    ) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        of_prompt, prompt_sum = flash(query, prompt_key, prompt_value, attn_mask=bias)
        of_own, own_sum = flash(query, own_key, own_value, is_causal=True)
        logsumexp = torch.logaddexp(prompt_sum, own_sum)
        out = of_prompt * (prompt_sum - logsumexp).exp()[..., None] + of_own * (own_sum - logsumexp).exp()[..., None]
        out = out.to(query.dtype)
        ctx.save_for_backward(query, prompt_key, prompt_value, own_key, own_value, bias, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, prompt_key, prompt_value, own_key, own_value, bias, out, logsumexp = ctx.saved_tensors
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        d_query, *of_prompt = flash(d_out, query, prompt_key, prompt_value, out, logsumexp, 0.0, False, attn_mask=bias)
        d_query_own, *of_own = flash(d_out, query, own_key, own_value, out, logsumexp, 0.0, True)
        return d_query + d_query_own, *of_prompt, *of_own, None
