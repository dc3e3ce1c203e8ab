"""The report over a run."""

from typing import ClassVar

from pydantic import Field, model_validator

from nanodag.config.kind import PAGE, Kind
from nanodag.config.stage_base import StageBase
from nanodag.data.config import SourceConfig
from nanodag.data.question_form import check_effect

MAX_SEARCHED = 200_000_000  # bytes of each training source: about half a minute


class ReportStage(StageBase):
    """report.md and report.html over its inputs."""

    plan_formula: ClassVar[str] = "nanodag.plan.small_stages:REPORT"

    contamination: tuple[SourceConfig, ...] = ()
    """Benchmark sources whose 13-grams are looked for in the training data."""
    price_per_hour: float = Field(0.0, ge=0)
    """Price of one device an hour, in any currency; 0 leaves prices out."""

    @model_validator(mode="after")
    def _data_alone_is_read(self) -> "ReportStage":
        for source in self.contamination:
            check_effect(source, "text")
        return self


KIND = Kind(
    name="report",
    config=ReportStage,
    module="nanodag.report",
    code_version=3,
    makes=PAGE,
    takes_what_exists=True,
    is_on_cpu=True,
    order=90,
)
