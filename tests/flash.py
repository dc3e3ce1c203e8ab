"""A stand-in for flash attention, which only GPUs have."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def bottom_right(query, key, value, bounds, window):
    """What flash attention over variable lengths does, by its documentation: the last query sees every key, or as many
    of the last as the window has."""
    queries, keys, longest_query, longest_key = bounds
    outputs = []
    for one in range(len(queries) - 1):
        own, others = (slice(*b[one : one + 2].tolist()) for b in (queries, keys))
        q, k, v = query[own], key[others], value[others]
        assert 0 < len(q) <= longest_query and 0 < len(k) <= longest_key
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        visible = visible if window is None else visible.triu(len(k) - len(q) + 1 - window)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
