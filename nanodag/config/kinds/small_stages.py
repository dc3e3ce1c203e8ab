"""Stages that multiply no matrices: tokenizer, import, report."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from nanodag.config.stage_base import ExternalInput, StageBase, answer, from_setting
from nanodag.data.config import SourceConfig
from nanodag.data.question_form import check_effect
from nanodag.data.records import Wanted

MAX_SEARCHED = 200_000_000  # bytes of each training source that a report searches: about half a minute


class TokenizerStage(StageBase):
    """Byte-level BPE trained on the beginning of the mixture."""

    record_kind: ClassVar[Wanted | None] = "document"
    plan_formula: ClassVar[str] = "nanodag.plan.small_stages:TOKENIZER"

    data: tuple[SourceConfig, ...] = Field(min_length=1)
    """The mixture of documents that the tokenizer is trained on."""
    vocabulary: int = Field(32768, ge=512, le=262144)
    """Tokens of the vocabulary, special tokens included."""
    max_bytes: int = Field(2_000_000_000, ge=10_000)
    """Bytes of text read from the mixture."""

    vocabulary_size = from_setting("vocabulary")


class ImportStage(StageBase):
    """A model that exists already, as a Hugging Face directory."""

    plan_formula: ClassVar[str] = "nanodag.plan.small_stages:IMPORT"

    model: str
    """The Hugging Face model: `hub:owner/name[@revision]` or `file:FOLDER`."""
    model_code: Literal["own", "transformers"] = "own"
    """Code that computes it from here on: our own decoder, for the types that it knows, or transformers' classes, for
    every other type: slower, never the code that comes with a model."""
    adapter: str = "none"
    """Adapters in peft's format that are added to its weights: `hub:owner/name[@revision]` or `file:FOLDER`."""

    known_model = from_setting("model")
    known_code = answer(lambda stage: "" if stage.model_code == "own" else stage.model_code)

    def external_inputs(self) -> Iterator[ExternalInput]:
        yield ExternalInput("model", "model", self.model)
        if self.adapter != "none":
            yield ExternalInput("adapter", "model", self.adapter)


class ReportStage(StageBase):
    """report.md and report.html over its inputs."""

    plan_formula: ClassVar[str] = "nanodag.plan.small_stages:REPORT"

    contamination: tuple[SourceConfig, ...] = ()
    """Benchmark sources whose 13-grams are looked for in the training data."""
    price_per_hour: float = Field(0.0, ge=0)
    """Price of one device an hour, in any currency; 0 leaves prices out."""

    def check_settings(self) -> None:
        for source in self.contamination:
            check_effect(source, "text")
