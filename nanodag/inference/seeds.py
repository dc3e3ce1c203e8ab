"""Seeds that samples are drawn with."""

import hashlib


def derived_seed(*parts: int | str) -> int:
    """63 bits that depend on these alone."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
