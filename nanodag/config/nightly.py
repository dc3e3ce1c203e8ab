"""Nightly evals: their settings, when their schedule was last due, and its time zone. CronSim reads the schedule."""

import logging
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import Field

from nanodag.config.section import Section, checked
from nanodag.errors import ConfigError

log = logging.getLogger(__name__)

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
    schedule: Annotated[str, checked(lambda cron: _schedule(cron, datetime.now().astimezone()))] = "0 3 * * *"
    """When nights begin, as cron."""
    timezone: Annotated[str, checked(lambda name: zone_of(name))] = "local"
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

    def check_settings(self) -> None:
        if twice := sorted(set(self.runs) & set(self.models)):
            raise ValueError(f"{twice[0]!r} is a label in both runs and models; a line of the trend has one meaning")


def last_due(cron: str, now: datetime) -> datetime:
    """The newest time, at or before `now`, that a schedule names, in now's time zone.

    now: with a time zone. An hour that the clocks skip in spring is due when they have gone forward. Raises ConfigError
    for a text that is no schedule.
    """
    try:
        return next(_schedule(cron, now.replace(second=0, microsecond=0) + timedelta(minutes=1)))
    except StopIteration:
        raise ConfigError(f"Schedule {cron!r} names no day of the last fifty years; check its day and month.") from None


def _schedule(cron: str, begin: datetime) -> CronSim:
    if len(cron.split()) != 5:
        raise ConfigError(
            f"Schedule {cron!r} has {len(cron.split())} fields; it needs 5 (minute, hour, day of the month, month, day "
            "of the week), as `0 3 * * *` for 03:00 every day."
        )
    try:
        return CronSim(cron, begin, reverse=True)
    except CronSimError as error:
        raise ConfigError(f"Schedule {cron!r}: {str(error).lower()}; see `man 5 crontab`.") from None


def zone_of(name: str) -> str:
    """The IANA name of a time zone; `local` is this machine's, UTC (and a warning) where it says none that has one.

    Raises ConfigError for another name that is none.
    """
    zone = (os.environ.get("TZ", "").lstrip(":") or _machine_zone()) if name == "local" else name
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        if name != "local":
            raise ConfigError(f"There is no time zone {name!r}; give an IANA name such as Europe/Berlin.") from None
        log.warning("This machine's time zone %r has no IANA name: nights are told by UTC. Set nightly.timezone.", zone)
        return "UTC"
    return zone


def _machine_zone() -> str:
    _, separator, name = os.path.realpath("/etc/localtime").rpartition("/zoneinfo/")
    if separator:
        return name
    written = Path("/etc/timezone")
    return written.read_text().strip() if written.is_file() else "UTC"
