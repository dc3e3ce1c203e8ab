"""A tokenizer as the API needs it: a text's ids, the text of ids as they come, and one token by itself."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from nanodag.tokenizer import bounds
from nanodag.tokenizer.encoding import Encoding


class TokenText:
    """The tokenizer of a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises SourceError where there is no tokenizer."""
        self.encoding = Encoding(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def prompt_ids(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text in which special tokens may be spelled out. special: with those that the tokenizer adds by
        itself, such as <|bos|>."""

        # `encode` would keep the interpreter's lock
        def ids_of(part: str) -> list[int]:
            return self.tokenizer.encode_batch([part], add_special_tokens=special)[0].ids

        if (bound := bounds.in_force.get()) is not None:
            bound.check_texts([text], lambda part: len(ids_of(part)))
        return ids_of(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        return self.tokenizer.decode(list(ids))

    def name(self, token: int) -> str:
        """A token by itself: its text, `bytes:\\xe2\\x80` where its bytes are no whole characters (as OpenAI writes
        them), its name where it is a special one."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes_of(self, token: int) -> bytes:
        """Its bytes; of a special token those of its name."""
        if token in self.encoding.special_ids:
            return self.encoding.decode([token]).encode()
        return self.encoding.decode_bytes([token])


class Decoding:
    """The text of one answer, token by token. A character whose bytes are not all there waits for the rest."""

    def __init__(self, tokens: TokenText) -> None:
        self._tokenizer = tokens.tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._waiting: list[int] = []

    def step(self, token: int) -> str:
        """Text that this token adds."""
        piece = self._stream.step(self._tokenizer, token)  # None where it is not certain yet
        self._waiting = [*self._waiting, token] if piece is None else []
        return piece or ""

    def rest(self) -> str:
        """Rest at the end: bytes that never became a character, as U+FFFD."""
        return self._tokenizer.decode(self._waiting) if self._waiting else ""
