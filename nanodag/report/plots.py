"""Plots as data: a page's script (plots.js) draws them with Plotly, in the page's own colours and letters."""

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from nanodag.host.beside import table_beside
from nanodag.report.gather import Column, ReportedStage, benchmarks_of
from nanodag.report.lineage import TEMPLATES
from nanodag.report.words import is_share, shortened

MAX_LINES = 6  # of a panel: as many as a page has colours (look.html.jinja)
MAX_POINTS = 400
LONGEST_TICK = 12  # letters
LISTED: dict[str, Any] = table_beside(__file__, "panels.yaml")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One set of axes. lines: label -> (x, y); marked: labels that are drawn with points as well; smooth: faint raw
    values with a running mean over them; intervals: label -> (low, high) about its y. ticks: what stands below the
    horizontal axis, (x, text). from_zero: the vertical axis begins at 0. relative: each line from its lowest value to
    its highest. levels: label -> a dashed line's height."""

    title: str
    x_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    marked: Sequence[str] = ()
    smooth: Sequence[str] = ()
    intervals: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    ticks: Sequence[tuple[float, str]] = ()
    from_zero: bool = False
    relative: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Name of the plot for readers who do not see it: each line's first value and its last."""
        told = [f"{label} {ys[0]:.4g} to {ys[-1]:.4g}" for label, (_, ys) in self.lines.items() if ys]
        return shortened(f"{self.title}: {', '.join(told)}")

    @property
    def data(self) -> dict[str, Any]:
        """The fields, for JSON: lines of at most MAX_POINTS points; None, a gap, for what is no number."""
        return {**vars(self), "lines": {label: _thinned(*line) for label, line in self.lines.items()}}


def score_panels(columns: Sequence[Column]) -> list[Panel]:
    """Every benchmark's score with its 95 % interval, model after model."""
    ticks = [(place, shortened(column.label, LONGEST_TICK)) for place, column in enumerate(columns)]
    return [
        score_panel(name, {place: s for place, c in enumerate(columns) if (s := c.benchmark(name)) is not None}, ticks)
        for name in benchmarks_of(columns)
    ]


def score_panel(title: str, scores: Mapping[int, Mapping[str, Any]], ticks: Sequence[tuple[float, str]]) -> Panel:
    """A benchmark's score with its 95 % interval. scores: by their places on the horizontal axis."""
    scale = 100 if is_share(next(iter(scores.values()))["metric"]) else 1
    value, low, high = ([scale * score[name] for score in scores.values()] for name in ("value", "low", "high"))
    title, lines = f"{title} (%)" if scale == 100 else title, {"score": ([*scores], value)}
    intervals = {"score": (low, high)}
    return Panel(title=title, x_label="", lines=lines, marked=["score"], intervals=intervals, ticks=ticks)


def panels_of(stage: ReportedStage) -> list[Panel]:
    """The plots that panels.yaml lists for the kind of a stage, of what the stage has recorded."""
    benchmarks = {f"benchmark_{name}": name for line in stage.lines if (name := line.get("benchmark"))}
    named = {"watched": {"reward": "reward", **stage.watched} if stage.watched else {}, "benchmarks": benchmarks}
    panels = _calibration(stage)
    for entry in LISTED.get(stage.kind.config.curves, ()):
        names, how = named.get(str(entry["lines"]), entry["lines"]), {k: v for k, v in entry.items() if k != "busy"}
        lines: dict[str, Any] = {label: curve for name, label in names.items() if (curve := stage.curve(name))[0]}
        if "busy" in entry:
            whole = dict(zip(*stage.curve(entry["busy"]), strict=True))
            shares = {
                label: [(x, 1 - y / whole[x]) for x, y in zip(*line) if whole.get(x)] for label, line in lines.items()
            }
            lines = {label: tuple(zip(*pairs)) for label, pairs in shares.items() if pairs}
        if lines:
            panels.append(Panel(**{**how, "x_label": "step", "lines": lines}))
    return panels


def overlaid(stages: Mapping[str, ReportedStage]) -> list[Panel]:
    """The plots of several stages over each other, a panel for each of their lines, a line and a colour for each."""
    panels: dict[str, Panel] = {}
    for name, panel in ((name, panel) for name, stage in stages.items() for panel in panels_of(stage)):
        for label, line in panel.lines.items():
            title = panel.title if label.lower() in panel.title.lower() else f"{panel.title}: {label}"
            before = panels.get(title, replace(panel, title=title, lines=dict.fromkeys(stages, ((), ()))))
            of_all: dict[str, Any] = {
                how: list(stages) if label in getattr(panel, how) else [] for how in ("smooth", "marked")
            }
            panels[title] = replace(before, lines={**before.lines, name: line}, **of_all)
    return list(panels.values())


def _calibration(stage: ReportedStage) -> list[Panel]:
    """How often a reward model is right by how sure it is, at its last validation."""
    last: Mapping[str, Any] = next((line for line in reversed(stage.lines) if "validation_sure_55" in line), {})
    sure = [percent for percent in range(55, 100, 10) if last.get(f"validation_sure_{percent}")]
    if not sure:
        return []
    right = [100 * last[f"validation_right_{percent}"] for percent in sure]
    lines = {"right": (sure, right), "as sure as it is right": (sure, sure)}
    return [Panel(title="Held-out pairs told apart (%)", x_label="how sure (%)", lines=lines, marked=["right"])]


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> list[list[float | None]]:
    """At most MAX_POINTS points: means over equal runs, so that no spike's neighbourhood is lost to chance."""
    size = max(1, -(-len(xs) // MAX_POINTS))
    runs = [slice(i, i + size) for i in range(0, len(xs), size)]
    means = [sum(ys[run]) / len(ys[run]) for run in runs]
    return [[xs[run][-1] for run in runs], [float(f"{y:.6g}") if math.isfinite(y) else None for y in means]]


@cache
def page_scripts() -> tuple[tuple[str, str], ...]:
    """Plotly's script and the page's own, each with the name by which a page's policy allows it and no other."""
    plotly = distribution("plotly").locate_file("plotly/package_data/plotly.min.js")  # importing it takes a second
    texts = [Path(str(path)).read_text(encoding="utf-8") for path in (plotly, TEMPLATES / "plots.js")]
    return tuple((text, f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'") for text in texts)
