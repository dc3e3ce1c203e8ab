"""Ids of bytes that may be no UTF-8: a text cut anywhere."""

import re

from nanodag.tokenizer.encoding import Encoding, byte_to_character

ESCAPED_BYTE = re.compile("([\udc80-\udcff])")


def encode_bytes(encoding: Encoding, data: bytes) -> list[int]:
    """Ids whose bytes are exactly data: text where it is UTF-8, single-byte tokens where it is not."""
    ids: list[int] = []
    for piece in ESCAPED_BYTE.split(data.decode("utf-8", "surrogateescape")):
        if ESCAPED_BYTE.match(piece):
            ids.append(encoding.token_id(byte_to_character()[ord(piece) - 0xDC00]))
        elif piece:
            ids.extend(encoding.encode(piece))
    return ids
