"""What pipeline.yaml may say about nightly evals."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from nanodag.config.cron import check_schedule, zone_of
from nanodag.config.section import Section

Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,40}$")]


class PinnedModel(Section):
    """A model that stays the same, to measure others against."""

    model: str
    """The model, as in an import stage."""
    evals: tuple[str, ...] = Field(min_length=1)
    """Eval stages of the preset whose benchmarks it is asked."""


class NightlyConfig(Section):
    """Evaluations by schedule."""

    enabled: bool = True
    """Whether the schedule is on at first; `nanodag nightly on` and `off`, or the switch in Prefect's UI, change it."""
    schedule: str = "0 3 * * *"
    """When nights begin, as cron."""
    timezone: str = "local"
    """The schedule's time zone; `local` for this machine's."""
    runs: dict[Label, str] = {"newest": "*"}
    """Label -> name of a run, or a pattern such as `main-*` for the newest run that fits and has the stage. Nights of
    one label form one line of the trend."""
    stages: tuple[str, ...] | Literal["all"] = "all"
    """Stages whose models are evaluated; `all` takes those that the run has an eval stage for."""
    models: dict[Label, PinnedModel] = {}
    """Label -> a pinned model beside the runs' models."""
    false_alarms: float = Field(0.01, gt=0, lt=0.5)
    """Chance that a night on which nothing is worse says otherwise."""
    compare_nights: int = Field(30, ge=1, le=1000)
    """Nights back over which the best is looked for."""

    @field_validator("schedule")
    @classmethod
    def _is_cron(cls, schedule: str) -> str:
        check_schedule(schedule)
        return schedule

    @field_validator("timezone")
    @classmethod
    def _is_zone(cls, timezone: str) -> str:
        zone_of(timezone)
        return timezone

    @model_validator(mode="after")
    def _labels_differ(self) -> "NightlyConfig":
        if twice := sorted(set(self.runs) & set(self.models)):
            raise ValueError(f"{twice[0]!r} is a label in both runs and models; a line of the trend has one meaning")
        return self
