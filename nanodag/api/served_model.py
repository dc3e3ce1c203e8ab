"""Served model: its name, and the engine behind it."""

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nanodag.api.refusals import Refused
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
    answer. is_sglang: true where the engine can hold an answer to a JSON schema. root: where the weights are from."""

    name: str
    tokens: TokenText
    renderer: ChatRenderer | None
    backend: Backend
    context_length: int
    vocab_size: int
    is_sglang: bool = False
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
