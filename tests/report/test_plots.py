"""Plots follow the page: its colours by day and by night; and nothing in them, or near them, becomes a script."""

import html
import json
import re
from html.parser import HTMLParser

import pytest

from nanodag.report.page import PageSection, Part, Report, to_html
from nanodag.report.plots import MAX_LINES, Panel, page_scripts
from nanodag.report.tables import Cell, Table
from tests.report.finished_run import markup_of

HOSTILE = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">'"


class Parsed(HTMLParser):
    """Plots of a page by their id, its scripts, and its other tags that a name could have smuggled in."""

    def __init__(self, page):
        super().__init__()
        self.plots, self.scripts, self.others, self._in_script = {}, [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self._in_script = tag == "script"
        if "data-panel" in attributes:
            self.plots[attributes["id"]] = attributes | {"panel": json.loads(attributes["data-panel"])}
        if tag == "img" or any(name.startswith("on") for name in attributes):
            self.others.append(tag)

    def handle_data(self, text):
        if self._in_script:
            self.scripts.append(text)
            self._in_script = False


@pytest.fixture(scope="module")
def panel():
    return Panel(
        title="Loss < 1",
        x_label="step",
        lines={"loss": (range(1, 13), [12.0 - n for n in range(11)] + [float("nan")]), HOSTILE: ([1, 2], [0.5, 0.25])},
        marked=(HOSTILE,),
        smooth=("loss",),
        intervals={HOSTILE: ([0.25, 0.125], [1.0, 0.5])},
        levels={"GPT-2": 3.0},
        from_zero=True,
    )


@pytest.fixture(scope="module")
def page(panel):
    table = Table(headers=["what", "why"], rows=[[Cell(text="a longword"), Cell(text="x" * 60)]], numeric=())
    section = PageSection(title="S", parts=[Part(heading="rl", panels=[panel]), Part(table=table)])
    return to_html(Report(title="T", subtitle="", cards=[], sections=[section]))


def test_a_panel_is_data_of_few_points_without_what_is_no_number(panel):
    (xs, ys), hostile = panel.data["lines"].values()
    assert (xs[:2], ys[:2], ys[-1]) == ([1, 2], [12.0, 11.0], None) and hostile == [[1, 2], [0.5, 0.25]]
    many = Panel(title="", x_label="", lines={"a": (range(2000), range(2000))})
    assert [values[:2] for values in many.data["lines"]["a"]] == [[4, 9], [2.0, 7.0]]
    assert len(many.data["lines"]["a"][0]) == 400


def test_a_page_has_its_two_scripts_and_nothing_else_that_runs(page):
    parsed = Parsed(page)
    (plot,) = parsed.plots.values()
    assert [script.strip() for script in parsed.scripts] == [text.strip() for text, _ in page_scripts()]
    assert parsed.others == []
    assert list(plot["panel"]["lines"]) == ["loss", HOSTILE]
    assert plot["role"] == "img" and plot["aria-label"].startswith("Loss < 1: loss 12 to nan, </script>")
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])
    assert "default-src 'none'; script-src 'sha256-" in policy and policy.count("sha256-") == 2
    assert "connect-src 'none'" in policy and "unsafe-eval" not in policy


def test_every_colour_of_a_plot_is_one_that_the_page_has_by_day_and_by_night(page):
    plotly, own = (text for text, _ in page_scripts())
    page = page.replace(plotly, "")
    used = set(re.findall(r"var\(--([\w-]+)\)", page)) | set(re.findall(r'"--([\w-]+)"', own))
    used |= {f"series-{number}" for number in range(1, MAX_LINES + 1)}
    day, night = page.split("prefers-color-scheme: dark", 1)
    assert {"ink", "soft", "axis", "grid", "paper"} <= used and f"number % {MAX_LINES} + 1" in own
    for name in used - {"on-link"}:
        assert f"--{name}:" in day, name
        assert f"--{name}:" in night.partition("</style>")[0], name


def test_a_page_without_plots_has_no_script():
    page = to_html(Report(title="T", subtitle="", cards=[], sections=[]))
    assert len(page) < 20_000 and "<script" not in page and "script-src &#39;none&#39;" in page


def test_only_a_word_too_long_for_any_column_may_be_broken_and_the_icon_stands_in_the_page(page):
    page = markup_of(page)
    assert '<td class="short" data-column="what">a longword</td>' in page
    assert f'<td class="long" data-column="why">{"x" * 60}</td>' in page
    assert not re.search(r"^td \{[^}]*overflow-wrap: anywhere", page, re.MULTILINE)
    assert page.count('<div class="scroll" tabindex="0"><table') == 1
    assert '<link rel="icon" href="data:image/svg+xml,' in page
