"""The trend page."""

import re

import pytest

from nanodag.nightly.compare import compare
from nanodag.nightly.trend import trend_report
from nanodag.report.page import to_html, to_markdown
from tests.nightly.made_nights import night_record, publish_eval

DAY = 24 * 3600.0
FIRST = 1_763_600_400.0  # 2025-11-20 01:00 UTC, 02:00 in Berlin


@pytest.fixture
def report(store, tmp_path):
    answers = [[1] * 90 + [0] * 10, [1] * 92 + [0] * 8, [1] * 60 + [0] * 40]
    scores = [publish_eval(store, tmp_path / f"{n}", f"run-{n}", row) for n, row in enumerate(answers)]
    beware = {
        "missing": ("main/rl: no run has finished that stage",),
        "stale": ("main/sft: stale in run r, pretrain was built since",),
    }
    nights = [
        night_record(f"nightly-{n}", [score], due=FIRST + n * DAY, night=beware if n == 2 else None)
        for n, score in enumerate(scores)
    ]
    found = compare(store, scores[2:], nights[:2], false_alarms=0.01)
    return trend_report(nights, found, false_alarms=0.01, zone="Europe/Berlin")


def test_the_page_says_what_is_worse_than_what_and_what_is_missing(report):
    text = to_markdown(report)
    (row,) = [line for line in text.splitlines() if line.startswith("| main/sft") and "worse" in line]
    assert "60.0 (58.0 to 62.0)" in row and "−32.0" in row and "worse than last night" in row and "< 0.001" in row
    assert "main/rl: no run has finished that stage" in text
    assert "## Stale\n" in text and "main/sft: stale in run r, pretrain was built since" in text
    assert "nightly-2 · 2025-11-22 02:00" in text, "in the schedule's time zone"
    rows = [line for line in text.splitlines() if line.startswith("| 2025-11-")]
    assert [row[2:18] for row in rows] == ["2025-11-22 02:00", "2025-11-21 02:00", "2025-11-20 02:00"]


def test_the_page_loads_nothing_from_elsewhere_and_has_a_point_a_night(report):
    page = to_html(report)
    assert (
        not re.search(r"""(src|href)=["'](?!#|data:image/svg)""", page)
        and "@import" not in page
        and "<script" not in page
    )
    assert page.count("<svg") == 1
    for day in ("11-20", "11-21", "11-22"):
        assert f">{day}</text>" in page
