"""Plots follow the page: its colours by day and by night, its letters, and legends that cover nothing."""

import re
from xml.etree import ElementTree

import pytest

from nanodag.report.page import PageSection, Part, Report, to_html
from nanodag.report.plots import Panel, add_legend, figure_of_page, panels_svg
from nanodag.report.tables import Cell, Table

LINES = {f"a label of some length {n}": ((1, 2, 3), (n, 9 - n, n)) for n in range(4)}


@pytest.fixture(scope="module")
def plots():
    many = Panel(title="many", x_label="step", lines=LINES)
    return panels_svg([Panel(title="one", x_label="step", lines={"loss": ((1, 2, 3), (3, 2, 1))}), many], name="p")


@pytest.fixture(scope="module")
def page(plots):
    table = Table(headers=["what", "why"], rows=[[Cell(text="a longword"), Cell(text="x" * 60)]], numeric=())
    section = PageSection(title="S", parts=[Part(svg=plots), Part(table=table)])
    return to_html(Report(title="T", subtitle="", cards=[], sections=[section]))


def test_every_colour_of_a_plot_is_one_that_the_page_has_by_day_and_by_night(plots, page):
    used = set(re.findall(r"var\(--([\w-]+)\)", page))
    day, night = page.split("prefers-color-scheme: dark")
    assert {"ink", "soft", "axis", "grid", "series-1", "series-4"} <= used
    for name in used - {"on-link"}:
        assert f"--{name}:" in day, name
        assert f"--{name}:" in night.partition("</style>")[0], name
    own = set(re.findall(r"(?:fill|stroke): ?(#\w+)", plots))
    assert not own, f"colours of the plot's own: {own}"


def test_a_plots_letters_are_the_pages_and_its_steps_whole_numbers(plots):
    words = [e.text for e in ElementTree.fromstring(plots).iter("{http://www.w3.org/2000/svg}text")]
    assert {"one", "step"} <= set(words)
    assert "DejaVu" not in plots and "font-size: " in plots
    assert "1.5" not in words[: words.index("step")]


@pytest.mark.parametrize("num_lines", [2, 4])
def test_a_legend_stands_between_title_and_axes(num_lines):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure, axis = figure_of_page()
    for label in list(LINES)[:num_lines]:
        axis.plot(*LINES[label], label=label)
    num_rows = add_legend(axis, list(LINES)[:num_lines])
    title = axis.set_title("title", fontsize=9, loc="left", pad=6 + 11 * num_rows)
    FigureCanvasAgg(figure).draw()
    legend = axis.get_legend().get_window_extent()
    assert legend.y0 >= axis.get_window_extent().y1 and legend.y1 <= title.get_window_extent().y0
    assert legend.x1 <= figure.bbox.x1


def test_a_long_legend_makes_the_picture_higher(plots):
    heights = [float(box.split()[3]) for box in re.findall(r'viewBox="([^"]+)"', plots)]
    assert heights[1] == heights[0] + 22, "four rows of 11 points, two of them usual"


def test_only_a_word_too_long_for_any_column_may_be_broken_and_the_icon_stands_in_the_page(page):
    assert '<td class="short" data-column="what">a longword</td>' in page
    assert f'<td class="long" data-column="why">{"x" * 60}</td>' in page
    assert not re.search(r"^td \{[^}]*overflow-wrap: anywhere", page, re.MULTILINE)
    assert page.count('<div class="scroll"><table') == page.count("<table")
    assert '<link rel="icon" href="data:image/svg+xml,' in page
