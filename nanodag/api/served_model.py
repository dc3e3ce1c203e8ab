"""Served model: its name, the engine behind it, and its tokenizer: a text's ids, the text of ids as they come, and one
token by itself."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from nanodag.api.refusals import Refused
from nanodag.inference.access_checks import DEFAULT_MAX_BODY_BYTES
from nanodag.inference.protocol import Completion, Request
from nanodag.tokenizer import bounds
from nanodag.tokenizer.chat import ChatRenderer
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
        """Its bytes; of a special token those of its name, of an image none."""
        if token >= self.encoding.size:
            return b""
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


class Backend(Protocol):
    """Engine that continues token ids: one behind SGLang's protocol, or what stands before one and writes it down."""

    def answer(self, request: Request, *, stream: bool) -> AsyncGenerator[Completion, None]:
        """One sample (params.n is 1), as it grows: each item holds all of it so far, the last has a finish reason.
        Without `stream` there is the last alone. To close the iterator ends the sample.

        Raises SamplerLost when the engine goes, BadRequest for what it refuses, SamplerError when it fails.
        """
        ...

    @property
    def is_ready(self) -> bool:
        """True when it would answer now."""
        ...

    @property
    def weight_version(self) -> str:
        """The weights that it has."""
        ...

    @property
    def num_restarts(self) -> int:
        """Number of its engines' restarts."""
        ...


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One name of /v1/models. renderer: None for a model without a chat template. context_length: tokens of prompt and
    answer. is_sglang: true where the engine can hold an answer to a JSON schema. reads_images: true where token
    ids may spell images. root: where the weights are from. lora_path: name of adapters that its requests are answered
    with, by their digest; empty for none."""

    name: str
    tokens: TokenText
    renderer: ChatRenderer | None
    backend: Backend
    context_length: int
    vocab_size: int
    is_sglang: bool = False
    reads_images: bool = False
    lora_path: str = ""
    root: str | Path = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def version(self, version: str) -> str:
        """Version of its weights by that of its engine's, which are those below its adapters."""
        return f"{version}+{self.lora_path}" if self.lora_path else version


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one request, and of all at once. max_waiting: samples in flight, those that the engines run included;
    more are answered 429. Tokens: None for what the model's context allows."""

    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    max_waiting: int = 1024
    request_timeout_s: float = 600.0
    events_per_s: float = 20.0
    keep_alive_s: float = 15.0

    def check_count(self, num_samples: int, what: str) -> None:
        """Raise Refused for a request of more samples than may ever be under way."""
        if num_samples > self.max_waiting:
            raise Refused(
                f"{what} are more than the {self.max_waiting} answers that may be under way here: ask for fewer at "
                "once, or raise --max-waiting.",
                param="n",
            )

    def check_room(self, num_in_flight: int, num_samples: int) -> None:
        """Raise Refused where so many more samples may not be under way now."""
        if num_in_flight + num_samples > self.max_waiting:
            raise Refused(
                f"{num_in_flight} answers are under way or wait, and {num_samples} more would be above "
                f"{self.max_waiting}: ask again later.",
                status=429, kind="rate_limit_error", code="queue_full",
            )  # fmt: skip


def model_named(models: Mapping[str, ServedModel], name: str) -> ServedModel:
    """The model that a request names, the first for an empty name. Raises Refused where there is none."""
    if not name:
        return next(iter(models.values()))
    if name not in models:
        message = f"There is no model {name[:200]!r} here; there is {', '.join(models)}."
        raise Refused(message, status=404, param="model", code="model_not_found")
    return models[name]
