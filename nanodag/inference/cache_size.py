"""Size of a sampler's keys and values, whichever engine holds them. No torch."""

SLOT_UNIT = 64
"""Slots of the embedded engine, and the parts of them that are read, are whole multiples of so many tokens."""
PREFILL_TOKENS = 1024
"""Tokens of prompts that the embedded engine runs together."""
DEFAULT_CACHE_BYTES = 2 << 30


def token_bytes(*, num_layers: int, num_kv_heads: int, head_width: int, element_bytes: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * num_layers * num_kv_heads * head_width * element_bytes


def slot_tokens(context: int) -> int:
    """Tokens of a slot that holds a context: rounded up to SLOT_UNIT."""
    return -(-context // SLOT_UNIT) * SLOT_UNIT
