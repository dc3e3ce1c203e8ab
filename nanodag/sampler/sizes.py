"""Sizes of what fits into memory: the cache's slots and their length, the shapes that a decode step may have."""

from nanodag.errors import BadRequest
from nanodag.inference.cache_size import SLOT_UNIT, slot_tokens, token_bytes
from nanodag.model.architecture import Architecture

ATTENTION_CHUNK = SLOT_UNIT
"""Tokens of the cache that deterministic attention takes at a time; slots are whole multiples of it."""
MIN_CONTEXT = 512


def plan_cache(
    architecture: Architecture, max_batch: int, context_length: int | None, cache_bytes: int, element_bytes: int = 4
) -> tuple[int, int]:
    """Number of slots, and tokens in each. element_bytes: of a number in the cache. Raises BadRequest if not even one
    sample fits."""
    a = architecture
    if max_batch < 1:
        raise BadRequest(f"max_batch is {max_batch}: at least one sample must run")
    if context_length is not None and not 2 <= context_length <= a.max_positions:
        raise BadRequest(f"context_length {context_length} is not between 2 and the model's {a.max_positions}")
    each = token_bytes(
        num_layers=a.num_layers, num_kv_heads=a.num_kv_heads, head_width=a.head_dim, element_bytes=element_bytes
    )
    context = context_length or a.max_positions
    if context_length is None:
        least = min(MIN_CONTEXT, a.max_positions)
        context = min(context, max(cache_bytes // (max_batch * each) // ATTENTION_CHUNK * ATTENTION_CHUNK, least))
    slot_bytes = each * slot_tokens(context)
    num_slots = min(max_batch, cache_bytes // slot_bytes)
    if num_slots < 1:
        raise BadRequest(
            f"one sample of {context} tokens needs {slot_bytes >> 20} MiB of cache, more than the "
            f"{cache_bytes >> 20} MiB allowed: lower context_length or raise cache_bytes"
        )
    return num_slots, context


def row_sizes(num_slots: int) -> tuple[int, ...]:
    """Numbers of rows that a step may have: few enough that their views stay cached, close enough to waste little."""
    return tuple(sorted({size for size in (1, 2, 4, *range(8, num_slots, 8)) if size < num_slots} | {num_slots}))


def read_length(needed: int, capacity: int, *, in_chunks: bool) -> int:
    """Length of the cache that a step reads to see ``needed`` tokens: rounded up, so that there are few shapes.

    in_chunks: to whole chunks of attention, as deterministic mode needs.
    """
    unit = ATTENTION_CHUNK if in_chunks else ATTENTION_CHUNK // 2
    while needed > 16 * unit:
        unit *= 2
    return min(-(-needed // unit) * unit, capacity)
