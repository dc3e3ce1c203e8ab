"""Plots as SVG text, to stand in a page: small, sharp at any size, the same bytes for the same data."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanodag.report.gather import Column, Stage, benchmarks_of
from nanodag.report.words import is_share, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2563eb", "#dc7a09", "#15803d", "#b91c5c", "#6d5bd0", "#5b6470")
MAX_POINTS = 400
SEPARATE_POINTS = 8  # up to so many, each has its interval drawn as a line in the band
LONGEST_TITLE, LONGEST_LABEL = 36, 12  # letters: longer ones leave their axes no room
_FONTS = ["DejaVu Sans"]  # ships with matplotlib, so every machine draws the same letters


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One set of axes. lines: label -> (x, y); marked: labels that are drawn with points as well; smooth: faint raw
    values with a running mean over them; intervals: label -> (low, high) about its y. ticks: what stands below the
    horizontal axis, (x, text). from_zero: the vertical axis begins at 0."""

    title: str
    x_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    marked: tuple[str, ...] = ()
    smooth: tuple[str, ...] = ()
    intervals: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    ticks: Sequence[tuple[float, str]] = ()
    from_zero: bool = False


def panels_svg(panels: Sequence[Panel], *, name: str) -> str:
    """Panels side by side, three in a row. name: makes ids within the SVG unique to the page."""
    figure, axes = _figure(len(panels))
    for axis, panel in zip(axes, panels, strict=True):
        _draw(axis, panel)
    return _svg(figure, name)


def scores_svg(columns: Sequence[Column], *, name: str) -> str:
    """Every benchmark's score with its 95 % interval, model after model."""
    benchmarks = [b for b in benchmarks_of(columns) if sum(c.benchmark(b) is not None for c in columns) > 0]
    figure, axes = _figure(len(benchmarks), width=2.3, height=2.5)
    for axis, benchmark in zip(axes, benchmarks, strict=True):
        found = [(i, c.benchmark(benchmark)) for i, c in enumerate(columns)]
        there = [(i, score) for i, score in found if score is not None]
        scale = 100 if is_share(there[0][1]["metric"]) else 1
        values = [scale * score["value"] for _, score in there]
        below = [scale * (score["value"] - score["low"]) for _, score in there]
        above = [scale * (score["high"] - score["value"]) for _, score in there]
        places = [i for i, _ in there]
        axis.plot(places, values, color="#c3cad4", linewidth=1.2, zorder=1)
        for place, value, low, high in zip(places, values, below, above, strict=True):
            colour = COLOURS[place % len(COLOURS)]
            axis.errorbar(place, value, yerr=[[low], [high]], fmt="o", color=colour, markersize=5, capsize=3, zorder=2)
        labels = [shortened(column.label, LONGEST_LABEL) for column in columns]
        axis.set_xticks(range(len(columns)), labels, fontsize=8)
        axis.set_xlim(-0.5, len(columns) - 0.5)
        title = shortened(benchmark, LONGEST_TITLE)
        axis.set_title(f"{title} (%)" if scale == 100 else title, fontsize=9, loc="left")
    return _svg(figure, name)


def supervised_panels(stage: Stage) -> list[Panel]:
    """Loss, validation and speed of a pretrain, midtrain or sft stage; what was not recorded is left out."""
    return _panels(
        stage,
        ("Training loss (nats a token)", {"loss": "loss"}, {"smooth": ("loss",)}),
        ("Validation (bits a byte)", {"validation_bits_per_byte": "validation"}, {"marked": ("validation",)}),
        ("Tokens a second", {"tokens_per_second": "tokens/s"}, {"from_zero": True}),
    )


def rl_panels(stage: Stage) -> list[Panel]:
    """Reward, length, how far the policy moved, and speed; what was not recorded is left out."""
    shares = {"clipped_share": "tokens clipped", "zero_spread_share": "groups all alike", "truncated_share": "cut off"}
    speed = {"sampled_tokens_per_second": "sampled", "tokens_per_second": "trained"}
    reward = {"reward": "rollouts", "eval_reward": "held out, greedy"}
    return _panels(
        stage,
        ("Reward", reward, {"smooth": ("rollouts",), "marked": ("held out, greedy",)}),
        ("Tokens an answer", {"response_tokens": "mean"}, {"smooth": ("mean",)}),
        ("Entropy (nats a token)", {"entropy": "entropy"}, {"smooth": ("entropy",)}),
        ("Shares", shares, {"from_zero": True}),
        ("Trainer against sampler (nats)", {"mismatch_absolute": "difference of log-probabilities"}, {}),
        ("KL to the reference (nats)", {"kl": "KL"}, {}),
        ("Tokens a second", speed, {"from_zero": True}),
    )


def _panels(stage: Stage, *drawn: tuple[str, dict[str, str], dict[str, Any]]) -> list[Panel]:
    panels = [Panel(title=t, x_label="step", lines=_lines(stage, names), **how) for t, names, how in drawn]
    return [panel for panel in panels if panel.lines]


def _lines(stage: Stage, names: Mapping[str, str]) -> dict[str, tuple[list[float], list[float]]]:
    found = {label: stage.curve(name) for name, label in names.items()}
    return {label: curve for label, curve in found.items() if curve[0]}


def _draw(axis: Any, panel: Panel) -> None:
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
    if panel.ticks:
        axis.set_xticks([x for x, _ in panel.ticks], [text for _, text in panel.ticks])
    if panel.from_zero:
        axis.set_ylim(bottom=0)
    axis.set_title(shortened(panel.title, 2 * LONGEST_TITLE), fontsize=9, loc="left")
    axis.set_xlabel(panel.x_label, fontsize=8)
    if len(panel.lines) > 1:
        axis.legend(fontsize=7.5, frameon=False)


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


def _figure(num: int, *, width: float = 3.4, height: float = 2.4) -> tuple["Figure", list[Any]]:
    import matplotlib
    from matplotlib.figure import Figure

    per_row = min(num, 4 if width < 3 else 3)
    num_rows = -(-num // per_row)
    matplotlib.rcParams["svg.hashsalt"] = "nanodag"  # ids in the SVG would otherwise be drawn at random
    matplotlib.rcParams["font.family"] = _FONTS
    matplotlib.rcParams["text.parse_math"] = False  # a name with two dollars in it is no formula
    figure = Figure(figsize=(width * per_row, height * num_rows), layout="constrained")
    axes = list(figure.subplots(num_rows, per_row, squeeze=False).flat)
    for axis in axes[num:]:
        axis.remove()
    for axis in axes[:num]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("#9aa3af")
        axis.grid(axis="y", color="#e8ebef", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8, colors="#4b5563", length=3)
    return figure, axes[:num]


def _svg(figure: "Figure", name: str) -> str:
    """The picture without XML header, its ids prefixed, as wide as the page but no wider than it was drawn for."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    width = round(figure.get_figwidth() * 105)
    text = re.sub(
        r' width="[0-9.]+pt" height="[0-9.]+pt"',
        f' style="max-width:{width}px;min-width:{min(width, 560)}px"',
        text,
        count=1,
    )
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    prefix = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
