"""The stage that trains a tokenizer."""

from typing import ClassVar

from pydantic import Field

from nanodag.config.kind import TOKENIZER, Kind
from nanodag.config.stage_base import StageBase
from nanodag.data.config import SourceConfig
from nanodag.data.records import Wanted


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

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary


KIND = Kind(
    name="tokenizer",
    config=TokenizerStage,
    module="nanodag.tokenizer.train",
    makes=TOKENIZER,
    is_on_cpu=True,
    order=10,
    less_memory="max_bytes=10000000",
)
