from datetime import UTC, datetime

import pytest

from nanodag.nightly.trend import _dates
from tests.nightly.made_nights import night_record


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (["2026-11-20T02:00", "2026-11-21T02:00"], ["11-20", "11-21"]),
        (["2026-11-20T02:00", "2026-11-20T14:30"], ["02:00", "14:30"]),
        (
            ["2026-11-19T02:00", "2026-11-20T02:00", "2026-11-20T14:30"],
            ["11-19\n02:00", "11-20\n02:00", "11-20\n14:30"],
        ),
    ],
)
def test_nights_of_one_day_are_told_apart_by_their_times(times, said):
    due = [datetime.fromisoformat(time).replace(tzinfo=UTC).timestamp() for time in times]
    assert _dates([night_record("n", [], due=d) for d in due], "UTC") == said
