"""Config of one source of data."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nanodag import registry
from nanodag.data.adapters import check_adapter
from nanodag.data.urls import parse_url
from nanodag.errors import ConfigError

QUESTION = "{question}"


class SourceConfig(BaseModel):
    """One source of a mixture. A bare string in the config is a source with that URL. In one mixture all sources have
    weights or none has; without weights, sources are mixed in proportion to their rows."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    url: str
    """Where the rows are, such as `hub:openai/gsm8k/main:train`, `file:rows.jsonl` or `python:module:function`
    (nanodag.data.urls)."""
    adapter: str = "auto"
    """The adapter that makes records of rows: a shipped name or a function as module:function; `auto` goes by the
    URL."""
    options: dict[str, bool | int | float | str] = {}
    """Options of the adapter, such as `tools: true` for gsm8k."""
    columns: dict[str, str] = {}
    """Other names of columns: what the adapter reads, and what the data set calls it, as in `{answer: label}`. A dot
    goes into a column that holds a table, as in `{answer: reward_model.ground_truth}`."""
    instruction: str = QUESTION
    """What the user says, with `{question}` where the question stands, as in `"{question}\\nAnswer in one word."`. It
    does not count for held_out."""
    reward: str = "auto"
    """The verifier of these prompts, in RL and in benchmarks of form `problems`: a reward by name; `auto` for the
    adapter's."""
    template_options: dict[str, bool | int | float | str] = {}
    """Switches of the model's chat template, such as `enable_thinking: false`."""
    weight: float | None = Field(None, gt=0)
    """Share of the mixture's text, relative to the other weights; the source repeats for ever. All sources of a mixture
    have one, or none."""
    epochs: float | None = Field(None, gt=0, le=1_000_000)
    """Passes over the source, fractions too, 1 unless given; the mixture ends when all are done."""
    held_out: Annotated[float, Field(ge=0, lt=1)] | Literal["last_shard"] = 0.0
    """What is kept from training and forms the validation part. A number: that share of the rows, chosen by a hash.
    `last_shard`: the last of the source's files, or of one file's row groups; nothing else is read for validation."""
    held_out_by: Literal["content", "prompt"] = "content"
    """What is hashed: the whole `content`, or the `prompt`, so that a problem stays on one side in SFT and RL alike."""

    @model_validator(mode="before")
    @classmethod
    def _bare_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("instruction")
    @classmethod
    def _has_a_question(cls, value: str) -> str:
        if value.count(QUESTION) != 1:
            raise ValueError(f"{value!r:.80} must hold {QUESTION} once, where the question stands")
        return value

    @field_validator("reward")
    @classmethod
    def _is_shipped(cls, value: str) -> str:
        if value != "auto" and value not in registry.names("reward"):
            raise ValueError(
                f"there is no reward {value!r:.80} that data may ask for; choose auto or one of "
                f"{', '.join(registry.names('reward'))}, or name it as the stage's `reward`"
            )
        return value

    @field_validator("url")
    @classmethod
    def _parses(cls, value: str) -> str:
        parse_url(value)
        return value

    @model_validator(mode="after")
    def _combination(self) -> "SourceConfig":
        if self.weight is not None and self.epochs is not None:
            raise ValueError(f"{self.url} has weight {self.weight} and epochs {self.epochs}; keep one of them")
        check_adapter(self.adapter, self.url, self.options)
        return self


def mixes_by_epochs(sources: Sequence[SourceConfig]) -> bool:
    """True for a mixture by epochs, False for one by weights. Raises ConfigError when only some have weights."""
    weighted = [source.url for source in sources if source.weight is not None]
    others = [source.url for source in sources if source.weight is None]
    if weighted and others:
        raise ConfigError(
            f"In one mixture {weighted[0]} has a weight and {others[0]} has none. A mixture by weights has no end, one "
            "by epochs has: give all of its sources a weight, or none."
        )
    return not weighted
