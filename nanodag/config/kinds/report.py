"""The report over a run."""

from typing import Literal

from pydantic import Field

from nanodag.config.stage_base import StageBase
from nanodag.data.config import SourceConfig


class ReportStage(StageBase):
    """report.md and report.html over its inputs. contamination: benchmark sources whose 13-grams are looked for in the
    training sources. price_per_hour: of one device, in any currency; 0 leaves prices out."""

    kind: Literal["report"]
    contamination: tuple[SourceConfig, ...] = ()
    price_per_hour: float = Field(0.0, ge=0)
