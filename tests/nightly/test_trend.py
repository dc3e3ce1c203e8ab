"""The trend page."""

import re

import pytest
from prefect.states import Failed

import tasks.nightly
from nanodag.errors import ConfigError, ServerBusy, ServerError
from nanodag.nightly.compare import compare
from nanodag.nightly.findings import post
from nanodag.nightly.trend import trend_report
from nanodag.report.page import to_html, to_markdown
from tests.http_server import listening
from tests.nightly.made_nights import night_record, publish_eval

DAY = 24 * 3600.0
FIRST = 1_763_600_400.0  # 2025-11-20 01:00 UTC, 02:00 in Berlin


@pytest.fixture
def report(store, tmp_path):
    answers = [[1] * 90 + [0] * 10, [1] * 92 + [0] * 8, [1] * 60 + [0] * 40]
    scores = [publish_eval(store, tmp_path / f"{n}", f"run-{n}", row) for n, row in enumerate(answers)]
    nights = [night_record(f"nightly-{n}", [score], due=FIRST + n * DAY) for n, score in enumerate(scores)]
    nights[-1]["nightly"]["missing"] = ["main/rl: no run has finished that stage"]
    nights[-1]["nightly"]["stale"] = ["main/sft: stale in run r, pretrain was built since"]
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


def test_a_webhook_gets_json_and_one_that_refuses_it_is_named_without_its_secret(monkeypatch):
    with listening() as (url, posted):
        monkeypatch.setenv("HOOK", f"{url}/hooks/secret")
        post("env:HOOK", {"text": "worse"})
    assert posted == [{"text": "worse"}]
    with pytest.raises(ServerError, match="cannot be reached") as caught:
        post("env:HOOK", {"text": "worse"})
    assert "secret" not in str(caught.value)
    with listening(403) as (url, _), pytest.raises(ServerError, match=r"/hooks/\.\.\. answered 403"):
        post(f"{url}/hooks/secret", {})


@pytest.mark.parametrize(
    ("answer", "may_pass"), [(302, False), (403, False), (404, False), (429, True), (500, True), (503, True)]
)
def test_a_webhook_is_asked_again_only_where_that_may_help(answer, may_pass):
    with listening(answer) as (url, _), pytest.raises(ServerError) as caught:
        post(f"{url}/hook", {})
    assert tasks.nightly.webhook.retry_condition_fn(tasks.nightly.webhook, None, Failed(data=caught.value)) == may_pass


def test_a_webhook_that_is_not_there_is_asked_again_and_one_that_can_never_be_reached_is_not():
    with pytest.raises(ServerBusy):
        post("http://127.0.0.1:1/hook", {})
    with pytest.raises(ServerError) as caught:
        post("htp://127.0.0.1/hook", {})
    assert not isinstance(caught.value, ServerBusy)
    assert tasks.nightly.webhook.retries == 3


def test_a_webhook_whose_variable_is_not_set_is_refused(monkeypatch):
    monkeypatch.delenv("HOOK", raising=False)
    with pytest.raises(ConfigError, match="HOOK is not set where the flows are served"):
        post("env:HOOK", {})
