"""Plots as SVG text, to stand in a page: small, sharp at any size, the same bytes for the same data.

Each panel is a picture of its own, so that the page lays out as many in a row as it has room for. Colours are those of
the page (look.html.jinja), light or dark; text is text, in the page's own letters.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from nanodag.report.gather import Column, ReportedStage, benchmarks_of
from nanodag.report.words import is_share, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2563eb", "#dc7a09", "#15803d", "#b91c5c", "#6d5bd0", "#5b6470")
INK, SOFT, AXIS, GRID = "#1f2937", "#4b5563", "#9aa3af", "#e8ebef"
# What stands in the picture in the place of each, for the page to choose.
VARIABLES = {INK: "ink", SOFT: "soft", AXIS: "axis", GRID: "grid"} | {
    colour: f"series-{number}" for number, colour in enumerate(COLOURS, start=1)
}
WIDTH, HEIGHT = 3.4, 2.4  # inches, of a panel
LEGEND_POINTS = 175  # the room beside the vertical axis for a row of the legend
LEGEND_ROW, USUAL_ROWS = 11, 2  # points; rows
RELATIVE = "Reward, and what it does not see"  # each from its lowest value to its highest
MAX_POINTS = 400
SEPARATE_POINTS = 8  # up to so many, each has its interval drawn as a line in the band
LONGEST_TITLE, LONGEST_LABEL = 36, 12  # letters: longer ones leave their axes no room
_FONTS = ["DejaVu Sans"]  # ships with matplotlib, so every machine leaves the same room for letters


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One set of axes. lines: label -> (x, y); marked: labels that are drawn with points as well; smooth: faint raw
    values with a running mean over them; intervals: label -> (low, high) about its y. ticks: what stands below the
    horizontal axis, (x, text). from_zero: the vertical axis begins at 0. levels: label -> a dashed line's height."""

    title: str
    x_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    marked: tuple[str, ...] = ()
    smooth: tuple[str, ...] = ()
    intervals: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    ticks: Sequence[tuple[float, str]] = ()
    from_zero: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)


def panels_svg(panels: Sequence[Panel], *, name: str) -> str:
    """Panels, to stand side by side. name: makes ids within the SVGs unique to the page."""
    pictures = []
    for number, panel in enumerate(panels):
        figure, axis = figure_of_page()
        num_rows = _draw(axis, panel)
        # A legend of more rows than most makes the picture higher, and the axes no lower.
        figure.set_size_inches(WIDTH, HEIGHT + max(0, num_rows - USUAL_ROWS) * LEGEND_ROW / 72)
        pictures.append(_svg(figure, f"{name}-{number}", panel.title))
    return f'<div class="panels">{"".join(pictures)}</div>'


def scores_svg(columns: Sequence[Column], *, name: str) -> str:
    """Every benchmark's score with its 95 % interval, model after model."""
    benchmarks = [b for b in benchmarks_of(columns) if any(c.benchmark(b) is not None for c in columns)]
    pictures = []
    for number, benchmark in enumerate(benchmarks):
        figure, axis = figure_of_page(width=2.3, height=2.5)
        there = [(i, score) for i, c in enumerate(columns) if (score := c.benchmark(benchmark)) is not None]
        scale = 100 if is_share(there[0][1]["metric"]) else 1
        values = [scale * score["value"] for _, score in there]
        below = [scale * (score["value"] - score["low"]) for _, score in there]
        above = [scale * (score["high"] - score["value"]) for _, score in there]
        places = [i for i, _ in there]
        axis.plot(places, values, color=AXIS, alpha=0.6, linewidth=1.2, zorder=1)
        for place, value, low, high in zip(places, values, below, above, strict=True):
            colour = COLOURS[place % len(COLOURS)]
            axis.errorbar(place, value, yerr=[[low], [high]], fmt="o", color=colour, markersize=5, capsize=3, zorder=2)
        labels = [shortened(column.label, LONGEST_LABEL) for column in columns]
        axis.set_xticks(range(len(columns)), labels, fontsize=8)
        axis.set_xlim(-0.5, len(columns) - 0.5)
        title = shortened(benchmark, LONGEST_TITLE)
        title = f"{title} (%)" if scale == 100 else title
        axis.set_title(title, fontsize=9, loc="left")
        pictures.append(_svg(figure, f"{name}-{number}", title))
    return f'<div class="panels small">{"".join(pictures)}</div>'


def supervised_panels(stage: ReportedStage) -> list[Panel]:
    """Loss, validation, CORE and speed of a supervised stage, and how pairs are told apart; what was not recorded is
    left out."""
    told = {"accuracy": "training", "validation_accuracy": "held out"}
    unit = "pair" if any("accuracy" in line for line in stage.lines) else "token"
    return [
        *_calibration(stage),
        *_panels(
            stage,
            (f"Training loss (nats a {unit})", {"loss": "loss"}, {"smooth": ("loss",)}),
            ("Pairs told apart (share)", told, {"smooth": ("training",), "marked": ("held out",)}),
            ("Gain over the start (nats)", {"chosen_gain": "chosen", "rejected_gain": "rejected"}, {}),
            ("Scores", {"chosen_score": "chosen", "rejected_score": "rejected"}, {}),
            ("Validation (bits a byte)", {"validation_bits_per_byte": "validation"}, {"marked": ("validation",)}),
            ("CORE", {"core": "CORE"}, {"marked": ("CORE",), "levels": {"GPT-2": 0.2565}}),  # by nanochat's leaderboard
            ("Tokens a second", {"tokens_per_second": "tokens/s"}, {"from_zero": True}),
        ),
    ]


def _calibration(stage: ReportedStage) -> list[Panel]:
    """How often a reward model is right by how sure it is, at its last validation."""
    last: Mapping[str, Any] = next((line for line in reversed(stage.lines) if "validation_sure_55" in line), {})
    sure = [percent for percent in range(55, 100, 10) if last.get(f"validation_sure_{percent}")]
    if not sure:
        return []
    right = [100 * last[f"validation_right_{percent}"] for percent in sure]
    lines = {"right": (sure, right), "as sure as it is right": (sure, sure)}
    return [Panel(title="Held-out pairs told apart (%)", x_label="how sure (%)", lines=lines, marked=("right",))]


def rl_panels(stage: ReportedStage) -> list[Panel]:
    """Reward, length, how far the policy moved, and speed; what was not recorded is left out."""
    shares = {"clipped_share": "tokens clipped", "zero_spread_share": "groups all alike", "truncated_share": "cut off"}
    speed = {"sampled_tokens_per_second": "sampled", "tokens_per_second": "trained"}
    reward = {"reward": "rollouts", "eval_reward": "held out"}
    several = {"turns": "turns", "tool_results": "tool results", "sequences": "sequences"}
    benchmarks = dict.fromkeys(line["benchmark"] for line in stage.lines if "benchmark" in line)
    scores = {f"benchmark_{name}": name for name in benchmarks}
    beside = {"reward": "reward", **stage.watched} if stage.watched else {}
    return _panels(
        stage,
        ("Reward", reward, {"smooth": ("rollouts",), "marked": ("held out",)}),
        (RELATIVE, beside, {"smooth": ("reward", *stage.watched.values())}),
        ("Benchmarks", scores, {"marked": tuple(benchmarks)}),
        ("Tokens an answer", {"response_tokens": "mean"}, {"smooth": ("mean",)}),
        ("Turns of a sample", several, {"from_zero": True}),
        ("Entropy (nats a token)", {"entropy": "entropy"}, {"smooth": ("entropy",)}),
        ("Shares", shares, {"from_zero": True}),
        ("Trainer against sampler (nats)", {"mismatch_absolute": "difference of log-probabilities"}, {}),
        ("KL to the reference (nats)", {"kl": "KL"}, {}),
        ("Tokens a second", speed, {"from_zero": True}),
    )


PANELS: Mapping[str, Callable[[ReportedStage], list[Panel]]] = {
    "": lambda stage: [],
    "loss": supervised_panels,
    "rollouts": rl_panels,
}
"""Panels of a stage by the `curves` of its kind."""


def _panels(stage: ReportedStage, *drawn: tuple[str, dict[str, str], dict[str, Any]]) -> list[Panel]:
    panels = []
    for title, names, how in drawn:
        if lines := {label: curve for name, label in names.items() if (curve := stage.curve(name))[0]}:
            if title == RELATIVE:
                lines = {label: (xs, _of_range(ys)) for label, (xs, ys) in lines.items()}
            panels.append(Panel(title=title, x_label="step", lines=lines, **how))
    return panels


def _of_range(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / ((high - low) or 1.0) for value in values]


def _draw(axis: Any, panel: Panel) -> int:
    """Draw a panel; returns how many rows its legend has."""
    for number, (label, (xs, ys)) in enumerate(panel.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        if label in panel.intervals:
            low, high = panel.intervals[label]
            axis.fill_between(xs, low, high, color=colour, alpha=0.13, linewidth=0)
            if len(xs) <= SEPARATE_POINTS:
                axis.vlines(xs, low, high, color=colour, alpha=0.45, linewidth=1.2)
        xs, ys = _thinned(xs, ys)
        if label in panel.smooth and len(ys) >= 12:
            axis.plot(xs, ys, color=colour, linewidth=0.8, alpha=0.3)
            axis.plot(xs, running_mean(ys, max(3, len(ys) // 20)), color=colour, linewidth=1.6, label=label)
        else:
            marker = "o" if label in panel.marked or len(ys) < 2 else None
            axis.plot(xs, ys, color=colour, linewidth=1.5, marker=marker, markersize=3.5, label=label)
    for label, height in panel.levels.items():
        axis.axhline(height, color=AXIS, linewidth=1.2, linestyle="--", label=label)
    if panel.from_zero:
        axis.set_ylim(bottom=0)
    if panel.ticks:
        axis.set_xticks([x for x, _ in panel.ticks], [text for _, text in panel.ticks])
    elif panel.x_label == "step":
        axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel(panel.x_label, fontsize=8)
    num_rows = add_legend(axis, labels) if len(labels := [*panel.lines, *panel.levels]) > 1 else 0
    axis.set_title(shortened(panel.title, 2 * LONGEST_TITLE), fontsize=9, loc="left", pad=6 + LEGEND_ROW * num_rows)
    return num_rows


def add_legend(axis: Any, labels: Sequence[str]) -> int:
    """Put the legend between the title and the axes, where it covers nothing; returns how many rows it has."""
    widest = max(map(len, labels))
    num_columns = max(1, min(len(labels), int(LEGEND_POINTS / (26 + 4.2 * widest))))
    axis.legend(
        fontsize=7.5,
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        borderpad=0,
        ncols=num_columns,
        handlelength=1.4,
        columnspacing=1.2,
        labelspacing=0.3,
    )
    return -(-len(labels) // num_columns)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to window // 2 values on either side of it."""
    runs = [values[max(0, i - window // 2) : i + window // 2 + 1] for i in range(len(values))]
    return [sum(run) / len(run) for run in runs]


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most MAX_POINTS points: means over equal runs, so that no spike's neighbourhood is lost to chance."""
    size = -(-len(xs) // MAX_POINTS)
    if size <= 1:
        return list(xs), list(ys)
    runs = [slice(i, i + size) for i in range(0, len(xs), size)]
    return [xs[run][-1] for run in runs], [sum(ys[run]) / len(ys[run]) for run in runs]


def figure_of_page(*, width: float = WIDTH, height: float = HEIGHT) -> tuple["Figure", Any]:
    """A figure with one set of axes, whose colours are those of VARIABLES."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "nanodag"  # ids in the SVG would otherwise be drawn at random
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["font.family"] = _FONTS
    matplotlib.rcParams["text.parse_math"] = False  # a name with two dollars in it is no formula
    matplotlib.rcParams["text.color"] = INK
    matplotlib.rcParams["axes.labelcolor"] = SOFT
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(AXIS)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8, colors=SOFT, length=3)
    return figure, axis


def _svg(figure: "Figure", name: str, label: str) -> str:
    """The picture without XML header, its ids prefixed, its colours and letters those of the page."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    attributes = f' role="img" aria-label="{escape(label)}"'
    text = re.sub(r' width="[0-9.]+pt" height="[0-9.]+pt"', lambda _: attributes, text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]+;? ?", "", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(f": {colour}", f": var(--{variable})")
    prefix = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
