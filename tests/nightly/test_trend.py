"""The trend page: what is worse than what, and the dates below its curves."""

import re
from datetime import UTC, datetime

import pytest

from nanodag.nightly.findings import compare, dates_below, trend_report
from nanodag.report.page import to_html, to_markdown
from tests.nightly.made_nights import night_record
from tests.report.finished_run import markup_of

DAY = 24 * 3600.0
FIRST = 1_763_600_400.0  # 2025-11-20 01:00 UTC, 02:00 in Berlin


@pytest.fixture
def report(store, scored):
    answers = [[1] * 90 + [0] * 10, [1] * 92 + [0] * 8, [1] * 60 + [0] * 40]
    scores = [scored(f"run-{n}", row) for n, row in enumerate(answers)]
    nights = [night_record(f"nightly-{n}", [score], due=FIRST + n * DAY) for n, score in enumerate(scores)]
    beware = {"missing": ("main/rl: no run has finished",), "stale": ("main/sft: stale, pretrain was built since",)}
    nights[2] = night_record("nightly-2", scores[2:], due=FIRST + 2 * DAY, night=beware)
    found = compare(store, scores[2:], nights[:2], false_alarms=0.01)
    return trend_report(nights, found, false_alarms=0.01, zone="Europe/Berlin")


def test_the_page_says_what_is_worse_than_what_and_what_is_missing(report):
    text = to_markdown(report)
    (row,) = [line for line in text.splitlines() if line.startswith("| main/sft") and "worse" in line]
    assert "60.0 (58.0 to 62.0)" in row and "−32.0" in row and "worse than last night" in row and "< 0.001" in row
    assert "main/rl: no run has finished" in text
    assert "## Stale\n" in text and "main/sft: stale, pretrain was built since" in text
    assert "nightly-2 · 2025-11-22 02:00" in text, "in the schedule's time zone"
    rows = [line for line in text.splitlines() if line.startswith("| 2025-11-")]
    assert [row[2:18] for row in rows] == ["2025-11-22 02:00", "2025-11-21 02:00", "2025-11-20 02:00"]


def test_a_worse_score_is_first_and_red_with_its_tile_and_unchanged_ones_are_folded(store, scored):
    known = scored("run-0", [1] * 9 + [0]).changed(eval="other")
    before, worse = scored("run-1", [1] * 50), scored("run-2", [1] * 30 + [0] * 20)
    nights = [night_record("nightly-0", [known, before]), night_record("nightly-1", [known, worse], due=DAY)]
    found = compare(store, [known, worse], nights[:1], false_alarms=0.01)
    report = trend_report(nights, found, false_alarms=0.01, zone="UTC")
    assert (report.cards[0].text, report.cards[0].tone) == ("1", "bad")
    changed, unchanged = report.sections[0].parts
    ((_, _, score, difference, *_),) = changed.table.rows
    assert (score.text, score.verdict, score.tone) == ("60.0", "worse than last night", "bad")
    assert difference.text == "−40.0" and "sort exact_match 60.0 %, 100.0 % before: −40.0 points" in str(found[1])
    assert unchanged.folded and unchanged.heading == "unchanged: 1" and len(unchanged.table.rows) == 1
    page = to_html(report)
    assert page.index('class="verdict bad">worse') < page.index("<summary>unchanged: 1")


def test_the_page_loads_nothing_from_elsewhere_and_has_a_point_a_night(report):
    page = markup_of(to_html(report))
    assert not re.search(r"""(src|href)=["'](?!#|data:image/svg)|@import|<script""", page)
    assert page.count("data-panel=") == 1
    for day in ("11-20", "11-21", "11-22"):
        assert f'"{day}"' in page


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (["20T02:00", "21T02:00"], ["11-20", "11-21"]),
        (["20T02:00", "20T14:30"], ["02:00", "14:30"]),
        (["19T02:00", "20T02:00", "20T14:30"], ["11-19\n02:00", "11-20\n02:00", "11-20\n14:30"]),
    ],
)
def test_nights_of_one_day_are_told_apart_by_their_times(times, said):
    due = [datetime.fromisoformat(f"2026-11-{time}").replace(tzinfo=UTC).timestamp() for time in times]
    assert dates_below([night_record("n", [], due=d) for d in due], "UTC") == said
