"""The stage that trains a tokenizer."""

from typing import Literal

from pydantic import Field

from nanodag.config.stage_base import StageBase
from nanodag.data.config import SourceConfig


class TokenizerStage(StageBase):
    """Byte-level BPE trained on the first max_bytes of the mixture."""

    kind: Literal["tokenizer"]
    data: tuple[SourceConfig, ...] = Field(min_length=1)
    vocabulary: int = Field(32768, ge=512, le=262144)
    max_bytes: int = Field(2_000_000_000, ge=10_000)
