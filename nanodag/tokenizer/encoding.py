"""Text and bytes to token ids and back, for any Hugging Face folder with a tokenizer.json.

What is promised. Text (any string that UTF-8 can hold): decode(encode(text)) == text, with our own tokenizers and every
byte-level one; decode_bytes gives the bytes of any ids, valid UTF-8 or not. Text is only text: `<|end|>` in a document
becomes ordinary tokens, never the special one.
"""

import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nanodag.errors import SourceError
from nanodag.tokenizer import bounds

# Batches are encoded beside training, which needs the cores; and forked processes must not inherit a thread pool.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer


def byte_to_character() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Source: GPT-2 (openai/gpt-2, encoder.py): printable Latin-1 stands for itself, the rest for U+0100 and up in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + n) for n, b in enumerate(hidden)}}


class Encoding:
    """The tokenizer of a folder. bos_id: what a document begins with; a foreign tokenizer without one gives its eos."""

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / "tokenizer.json"
        if not path.is_file():
            raise SourceError(f"{folder} has no tokenizer.json; a tokenizer or model folder has one.")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.encode_special_tokens = True  # special tokens inside a text are text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._layout: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        settings_path = folder / "tokenizer_config.json"
        self.settings = json.loads(settings_path.read_text(encoding="utf-8")) if settings_path.is_file() else {}

    @property
    def size(self) -> int:
        """Tokens, special ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def bos_id(self) -> int:
        token_id = self.named("bos_token")
        token_id = self.named("eos_token") if token_id is None else token_id
        if token_id is None:
            raise SourceError("This tokenizer names neither bos_token nor eos_token; one must begin each document.")
        return token_id

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the tokenizer's eos, its bos, with which the next document begins, and those that
        generation_config.json names. A chat model's end of turn is among `ChatRenderer.stop_ids`."""
        path = self.folder / "generation_config.json"
        listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        ends = [self.named("eos_token"), self.named("bos_token"), *(listed if isinstance(listed, list) else [listed])]
        return tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))

    @cached_property
    def pad_id(self) -> int:
        token_id = self.named("pad_token")
        return self.bos_id if token_id is None else token_id

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(token["id"] for token in self._layout["added_tokens"] if token["special"])

    def token_id(self, token: str) -> int:
        """The id of a token by its text in the vocabulary. Raises SourceError when there is none."""
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise SourceError(f"The tokenizer has no token {token!r}.")
        return number

    def token_ids(self) -> dict[str, int]:
        """The whole vocabulary: token, as it stands there, -> id."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; no special tokens."""
        if (bound := bounds.in_force.get()) is not None:
            bound.check_texts(texts, lambda text: len(self._tokenizer.encode_batch_fast([text])[0].ids))
        return [encoded.ids for encoded in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode(self, text: str) -> list[int]:
        """Ids of one text; no special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens by name; bytes that are not UTF-8 become U+FFFD (decode_bytes keeps them)."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The exact bytes of ordinary tokens; special tokens have none."""
        return b"".join(self._bytes_by_id[token] for token in ids)

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """(size,) int32: UTF-8 bytes of each token, 0 for special ones. For bits per byte."""
        return np.array([len(token) for token in self._bytes_by_id], dtype=np.int32)

    @cached_property
    def _bytes_by_id(self) -> list[bytes]:
        to_bytes = _byte_level if '"ByteLevel"' in json.dumps(self._layout["decoder"]) else _with_byte_fallback
        added = {token["id"]: token for token in self._layout["added_tokens"]}
        token_bytes = [b""] * self.size
        for token, number in self.token_ids().items():
            if number not in added:
                token_bytes[number] = to_bytes(token)
            elif not added[number]["special"]:
                token_bytes[number] = token.encode()
        return token_bytes

    def named(self, name: str) -> int | None:
        """The id of what tokenizer_config.json has under a name such as `pad_token`; None where it has none."""
        token = self.settings.get(name)
        if isinstance(token, dict):
            token = token["content"]
        return None if token is None else self.token_id(token)


_BYTE_OF = {character: byte for byte, character in byte_to_character().items()}


def _byte_level(token: str) -> bytes:
    return bytes(_BYTE_OF[character] for character in token)


def _with_byte_fallback(token: str) -> bytes:
    """SentencePiece style: `▁` is a space and `<0x0A>` a byte."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
