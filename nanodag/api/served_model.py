"""Served model: its name, and the engine behind it."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nanodag.api.token_text import TokenText
from nanodag.inference.access_checks import DEFAULT_MAX_BODY_BYTES
from nanodag.inference.protocol import Completion, Request
from nanodag.tokenizer.chat import ChatRenderer


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
    answer. has_grammars: the engine can hold an answer to a JSON schema. root: where the weights are from."""

    name: str
    tokens: TokenText
    renderer: ChatRenderer | None
    backend: Backend
    context_length: int
    vocab_size: int
    is_sglang: bool = False
    has_grammars: bool = False
    root: str | Path = ""
    created: int = field(default_factory=lambda: int(time.time()))


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
