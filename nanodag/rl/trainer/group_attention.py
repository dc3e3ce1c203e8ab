"""Attention for a row in which several responses share one prompt (nanodag.rl.trainer.rows).

Every prompt attends causally to itself; every response to its prompt and causally to itself. Linear layers run over the
packed row without padding. On a CPU our own code takes the row as it is. Elsewhere attention pads: prompts and
responses lie in blocks, (G, P) and (R, L), because scaled_dot_product_attention takes rectangles.

Letters beyond those of packing: P the longest prompt, L the longest response, H query heads, K key-value heads, D head
width.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanodag.model.attention import Attend
from nanodag.model.cpu_attention import CpuAttention, Pieces, can_attend
from nanodag.rl.trainer.rows import MicroBatch


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where each token of a row lies in the padded blocks; made once a micro-batch, used by every layer.

    pieces: the same for attention on a CPU, a group for each prompt and its responses. prompt_places: (G, P) int64 and
    response_places: (R, L) int64, places in the row, padding points at place 0.
    prompt_real and response_real: the same shapes, bool, False for padding. prompt_of: (R,) int64. visible: (R, L,
    P + L) bool, what each token of a response sees. places_back: (T,) int64, place in the concatenation of both blocks,
    flattened.
    """

    pieces: Pieces
    prompt_places: Tensor
    response_places: Tensor
    prompt_real: Tensor
    response_real: Tensor
    prompt_of: Tensor
    visible: Tensor
    places_back: Tensor


def layout_of(row: MicroBatch, device: torch.device) -> GroupLayout:
    """The layout of one micro-batch."""
    prompts, responses = torch.from_numpy(row.prompts), torch.from_numpy(row.responses)
    prompt_places, prompt_real = _padded(prompts[:, 0], prompts[:, 1])
    response_places, response_real = _padded(responses[:, 0], responses[:, 1])
    prompt_of = responses[:, 2]
    num_places = response_places.shape[1]
    causal = torch.ones(num_places, num_places, dtype=torch.bool).tril()
    visible = torch.cat(
        [
            prompt_real[prompt_of][:, None, :].expand(-1, num_places, -1),
            causal.expand(len(responses), -1, -1),  # padding comes after every real token, so causality hides it
        ],
        dim=2,
    )
    places_back = torch.empty(row.num_tokens, dtype=torch.int64)
    places_back[prompt_places[prompt_real]] = prompt_real.flatten().nonzero().squeeze(1)
    places_back[response_places[response_real]] = prompt_real.numel() + response_real.flatten().nonzero().squeeze(1)
    moved = (prompt_places, response_places, prompt_real, response_real, prompt_of, visible, places_back)
    return GroupLayout(_pieces(row), *(tensor.to(device) for tensor in moved))


def _pieces(row: MicroBatch) -> Pieces:
    """The row's prompts, each with its responses after it, as they lie in the row."""
    order = np.argsort(np.concatenate([row.prompts[:, 0], row.responses[:, 0]]), kind="stable")
    pieces = np.concatenate([row.prompts, row.responses[:, :2]])[order]
    groups = np.append(np.flatnonzero(order < len(row.prompts)), len(pieces))
    seen = row.prompts[row.responses[:, 2], 1] + row.responses[:, 1]
    return Pieces(groups, pieces, int(max(row.prompts[:, 1].max(), seen.max(initial=0))))


def _padded(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Places start, start + 1, ... of each, padded to the longest: (count, longest) int64, and which are real."""
    longest = max(int(lengths.max()), 1)
    offsets = torch.arange(longest).expand(len(starts), -1)
    valid = offsets < lengths[:, None]
    return torch.where(valid, starts[:, None] + offsets, 0), valid


def group_attention(layout: GroupLayout) -> Attend:
    """The Attend of one row: query (1, T, H, D), key and value (1, T, K, D) -> (1, T, H, D)."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if can_attend(query):
            return CpuAttention.apply(query[0], key[0], value[0], layout.pieces)[None]
        return _fused(query[0], key[0], value[0], layout)[None]

    return attend


def _fused(query: Tensor, key: Tensor, value: Tensor, layout: GroupLayout) -> Tensor:
    """By scaled_dot_product_attention: on a GPU, and for heads whose width our own code does not take."""
    repeats = query.shape[1] // key.shape[1]
    prompts = [_picked(tensor, layout.prompt_places) for tensor in (query, key, value)]
    responses = [_picked(tensor, layout.response_places) for tensor in (query, key, value)]
    from_prompts = scaled_dot_product_attention(
        prompts[0], _repeated(prompts[1], repeats), _repeated(prompts[2], repeats), is_causal=True
    )
    from_responses = scaled_dot_product_attention(
        responses[0],
        _repeated(torch.cat([prompts[1][layout.prompt_of], responses[1]], dim=2), repeats),
        _repeated(torch.cat([prompts[2][layout.prompt_of], responses[2]], dim=2), repeats),
        attn_mask=layout.visible[:, None],
    )
    heads_last = (from_prompts.transpose(1, 2).flatten(0, 1), from_responses.transpose(1, 2).flatten(0, 1))
    return torch.cat(heads_last).index_select(0, layout.places_back)


def _picked(tensor: Tensor, places: Tensor) -> Tensor:
    """(T, heads, D) at (B, L) -> (B, heads, L, D)."""
    return tensor.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)


def _repeated(tensor: Tensor, repeats: int) -> Tensor:
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)
