"""When a cron schedule was last due, and in which time zone. CronSim reads the schedule."""

import logging
import os
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from nanodag.errors import ConfigError

log = logging.getLogger(__name__)


def last_due(cron: str, now: datetime) -> datetime:
    """The newest time, at or before `now`, that a schedule names, in now's time zone.

    now: with a time zone. An hour that the clocks skip in spring is due when they have gone forward. Raises ConfigError
    for a text that is no schedule.
    """
    try:
        return next(_schedule(cron, now.replace(second=0, microsecond=0) + timedelta(minutes=1)))
    except StopIteration:
        raise ConfigError(f"Schedule {cron!r} names no day of the last fifty years; check its day and month.") from None


def check_schedule(cron: str) -> None:
    """Raise ConfigError, naming the wrong field, for a text that is no schedule."""
    _schedule(cron, datetime.now().astimezone())


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
    wanted = (os.environ.get("TZ", "").lstrip(":") or _machine_zone()) if name == "local" else name
    try:
        ZoneInfo(wanted)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        if name != "local":
            raise ConfigError(f"There is no time zone {name!r}; give an IANA name such as Europe/Berlin.") from None
        log.warning(
            "This machine's time zone %r has no IANA name: nights are told by UTC. Set nightly.timezone.", wanted
        )
        return "UTC"
    return wanted


def _machine_zone() -> str:
    _, separator, name = os.path.realpath("/etc/localtime").rpartition("/zoneinfo/")
    if separator:
        return name
    written = Path("/etc/timezone")
    return written.read_text().strip() if written.is_file() else "UTC"
