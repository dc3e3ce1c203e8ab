"""When a cron schedule was last due.

Five fields: minute, hour, day of the month, month, day of the week (0 to 7, both ends Sunday); each `*`, numbers,
ranges `a-b`, steps `*/n` or `a-b/n`, and lists of these. Names of months and days are not taken.
"""

import logging
import os
import re
from datetime import date, datetime, time, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from nanodag.errors import ConfigError

log = logging.getLogger(__name__)

_FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day of the month", 1, 31), ("month", 1, 12), ("day of the week", 0, 7))
_PART = re.compile(r"(?P<all>\*)|(?P<first>\d+)(-(?P<last>\d+))?")
_LONGEST_WAIT_DAYS = 8 * 366  # from one 29 February to the next, across a century


def last_due(cron: str, now: datetime) -> datetime:
    """The newest time, at or before `now`, that a schedule names, in now's time zone.

    now: with a time zone. An hour that the clocks skip in spring counts as due when they have gone forward. Raises
    ConfigError for a schedule that is none, or that names no day of the last eight years.
    """
    minutes, hours, days, months, weekdays = fields_of(cron)
    # As cron has it: with both kinds of days given, either will do.
    either = not cron.split()[2].startswith("*") and not cron.split()[4].startswith("*")
    day = now.date()
    for _ in range(_LONGEST_WAIT_DAYS):
        by_date, by_weekday = day.day in days, day.isoweekday() % 7 in {weekday % 7 for weekday in weekdays}
        if day.month in months and (by_date or by_weekday if either else by_date and by_weekday):
            times = (_at(day, hour, minute, now) for hour in sorted(hours, reverse=True) for minute in minutes)
            found = max((moment for moment in times if moment <= now), default=None)
            if found is not None:
                return found
        day -= timedelta(days=1)
    raise ConfigError(f"Schedule {cron!r} names no day of the last eight years; check its day and month.")


def fields_of(cron: str) -> tuple[set[int], ...]:
    """The numbers that each of a schedule's five fields names. Raises ConfigError saying which field is wrong."""
    texts = cron.split()
    if len(texts) != len(_FIELDS):
        raise ConfigError(f"Schedule {cron!r} has {len(texts)} fields; it needs 5, as `0 3 * * *` for 03:00 every day.")
    return tuple(_numbers(text, cron, *field) for text, field in zip(texts, _FIELDS, strict=True))


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
    _, found, name = os.path.realpath("/etc/localtime").rpartition("/zoneinfo/")
    if found:
        return name
    written = Path("/etc/timezone")
    return written.read_text().strip() if written.is_file() else "UTC"


def _at(day: date, hour: int, minute: int, now: datetime) -> datetime:
    return datetime.combine(day, time(hour, minute), tzinfo=now.tzinfo)


def _numbers(text: str, cron: str, name: str, low: int, high: int) -> set[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        span, slash, step = part.partition("/")
        found = _PART.fullmatch(span)
        if found is None or (slash and not step.isdecimal()) or (slash and int(step) == 0):
            raise ConfigError(f"Schedule {cron!r}: {part!r} is no {name}; give *, numbers, a-b, or a step as */2.")
        first = low if found["all"] else int(found["first"])
        last = high if found["all"] or (slash and not found["last"]) else int(found["last"] or first)
        if not low <= first <= last <= high:
            raise ConfigError(f"Schedule {cron!r}: {name} {part!r} is not within {low} to {high}.")
        numbers |= set(range(first, last + 1, int(step) if slash else 1))
    return numbers
