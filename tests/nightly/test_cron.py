"""When a schedule was last due: worked out by hand, and against the cron code that Prefect carries."""

import random
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from prefect._vendor.croniter import croniter

from nanodag.config.nightly import last_due, zone_of
from nanodag.errors import ConfigError

BERLIN = ZoneInfo("Europe/Berlin")


def test_three_in_the_morning_is_last_nights_until_it_is_three_again():
    three = datetime(2026, 11, 20, 3, tzinfo=BERLIN)
    assert last_due("0 3 * * *", three - timedelta(minutes=1)) == three - timedelta(days=1)
    assert last_due("0 3 * * *", three) == three


def test_it_agrees_with_croniter_on_random_schedules():
    draw = random.Random(7)
    days = "* * 1 15-17 31", "* * 2 1-6", "* * 0 7 1-5"  # of the month, months, of the week
    for _ in range(200):
        fields = "0 */15 5,35 10-20/5 59", "3 * */6 22-23 0,12", *days
        cron = " ".join(draw.choice(field.split()) for field in fields)
        if " 31 2 " in cron:
            continue  # no such day, and croniter gives up where another kind of day would do
        now = datetime(2026, draw.randint(1, 12), draw.randint(1, 28), draw.randint(0, 23), 30, 30, tzinfo=UTC)
        assert last_due(cron, now) == croniter(cron, now).get_prev(datetime), (cron, now)


@pytest.mark.parametrize(
    ("cron", "said"),
    [
        ("0 3 * *", "has 4 fields; it needs 5"),
        ("0 25 * * *", "bad hour"),
        ("0 3 * * MONTAG", "bad day-of-week"),
        ("*/0 3 * * *", "bad minute"),
        ("0 3 31 2 *", "bad day-of-month"),  # a day that never comes
    ],
)
def test_a_wrong_schedule_names_its_field(cron, said):
    with pytest.raises(ConfigError, match=said):
        last_due(cron, datetime(2026, 11, 20, tzinfo=UTC))


def test_the_local_zone_is_the_one_that_tz_names(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert zone_of("local") == "Asia/Tokyo"
    monkeypatch.setenv("TZ", "CET-1CEST")
    assert zone_of("local") == "UTC", "a POSIX rule has no IANA name"
    with pytest.raises(ConfigError, match="no time zone 'Mars/Olympus'"):
        zone_of("Mars/Olympus")
