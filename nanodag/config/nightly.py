"""What pipeline.yaml may say about nightly evals."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nanodag.config.cron import check_schedule, zone_of

Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,40}$")]


class PinnedModel(BaseModel):
    """A model that stays the same, to measure others against. model: as an import stage's. evals: the eval stages of
    the preset whose benchmarks it is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    evals: tuple[str, ...] = Field(min_length=1)


class NightlyConfig(BaseModel):
    """Evals by schedule. enabled: what the schedule is at first; `nanodag nightly on` and `off`, or the switch in
    Prefect's UI, change it. schedule: cron, in timezone. runs: label -> name of a run, or a pattern such as `main-*`
    (the newest run that fits and has the stage); nights of one label stand in one line of the trend. stages: whose
    models; `all` are those that the run has an eval stage for. models: label -> a model beside the runs'.
    false_alarms: the chance that a night on which nothing is worse says otherwise. compare_nights: how many nights back
    the best is looked for. webhook: an address that hears of it, `none` for nobody, `env:NAME` for the one in an
    environment variable.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool = True
    schedule: str = "0 3 * * *"
    timezone: str = "local"
    runs: dict[Label, str] = {"newest": "*"}
    stages: tuple[str, ...] | Literal["all"] = "all"
    models: dict[Label, PinnedModel] = {}
    false_alarms: float = Field(0.01, gt=0, lt=0.5)
    compare_nights: int = Field(30, ge=1, le=1000)
    webhook: str = Field("none", pattern=r"^(none|env:\w+|https?://\S+)$")

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
