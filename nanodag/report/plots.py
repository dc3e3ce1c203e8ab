"""Plots as Plotly's figures, which a page draws with hover and zoom, in its own colours and letters, light or dark."""

import math
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from html import escape
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from nanodag.report.gather import Column, ReportedStage, benchmarks_of
from nanodag.report.lineage import TEMPLATES
from nanodag.report.words import is_share, shortened

COLOURS = tuple(f"--series-{number}" for number in range(1, 7))
"""Names of a page's colours (look.html.jinja), which its script looks up."""
RELATIVE = "Reward, and what it does not see"  # each from its lowest value to its highest
BUSY, MEMORY = "Busy (share of a step)", "Memory (GB)"  # the step less the wait in it; of bytes
MAX_POINTS = 400
SMOOTH_FROM, MAX_WHOLE = 12, 6  # points; steps of which each has a tick
LONGEST_LABEL, LONGEST_TICK = 40, 12  # letters: longer ones leave their axes no room


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

    @property
    def words(self) -> str:
        """Name of the plot for readers who do not see it: each line's first value and its last."""
        told = [f"{label} {ys[0]:.4g} to {ys[-1]:.4g}" for label, (_, ys) in self.lines.items() if ys]
        return shortened(f"{self.title}: {', '.join(told)}")

    @property
    def figure(self) -> dict[str, Any]:
        """Traces and layout. Plotly reads names and texts as HTML, so they are escaped."""
        places = [x for xs, _ in self.lines.values() for x in xs]
        traces = [trace for number, label in enumerate(self.lines) for trace in self._traces(label, number)]
        for label, height in self.levels.items():
            line = {"color": "--axis", "width": 1.2, "dash": "dash"}
            traces.append(_trace(label, [min(places), max(places)], [height, height], line))
        axis: dict[str, Any] = {"title": {"text": escape(self.x_label)}}
        if self.ticks:
            axis |= {"tickvals": [x for x, _ in self.ticks], "ticktext": [escape(text) for _, text in self.ticks]}
        elif self.x_label == "step":
            axis |= {"tickformat": ",d", "dtick": 1 if max(places) - min(places) < MAX_WHOLE else None}
        return {
            "data": traces,
            "layout": {"xaxis": axis, "yaxis": {"rangemode": "tozero" if self.from_zero else "normal"}},
        }

    def _traces(self, label: str, number: int) -> list[dict[str, Any]]:
        colour = COLOURS[number % len(COLOURS)]
        xs, ys = _thinned(*self.lines[label])
        if label in self.smooth and len(ys) >= SMOOTH_FROM:
            mean = running_mean(ys, max(3, len(ys) // 20))
            raw = _trace(label, xs, ys, {"color": f"{colour} 0.35", "width": 0.8}) | {"showlegend": False}
            return [raw, _trace(label, xs, mean, {"color": colour, "width": 1.6}) | {"hoverinfo": "skip"}]
        trace = _trace(label, xs, ys, {"color": colour, "width": 1.5})
        if label in self.marked or len(ys) < 2:
            trace |= {"mode": "lines+markers", "marker": {"color": colour, "size": 6}}
        if label in self.intervals:
            low, high = self.intervals[label]
            above, below = ([abs(end - y) for end, y in zip(ends, ys)] for ends in (high, low))
            bars = {"symmetric": False, "array": _numbers(above), "arrayminus": _numbers(below)}
            trace["error_y"] = {**bars, "color": colour, "thickness": 1.2, "width": 3}
        return [trace]


def score_panels(columns: Sequence[Column]) -> list[Panel]:
    """Every benchmark's score with its 95 % interval, model after model."""
    ticks = [(place, shortened(column.label, LONGEST_TICK)) for place, column in enumerate(columns)]
    panels = []
    for benchmark in benchmarks_of(columns):
        there = [(place, score) for place, c in enumerate(columns) if (score := c.benchmark(benchmark)) is not None]
        scale = 100 if is_share(there[0][1]["metric"]) else 1
        value, low, high = ([scale * score[name] for _, score in there] for name in ("value", "low", "high"))
        title = f"{benchmark} (%)" if scale == 100 else benchmark
        lines, marked = {"score": ([place for place, _ in there], value)}, ("score",)
        intervals = {"score": (low, high)}
        panels.append(Panel(title=title, x_label="", lines=lines, marked=marked, intervals=intervals, ticks=ticks))
    return panels


UPDATES = (
    ("Gradient norm", {"gradient_norm": "norm"}, {"smooth": ("norm",)}),
    ("Learning rate", {"learning_rate": "rate"}, {"from_zero": True}),
)


def supervised_panels(stage: ReportedStage) -> list[Panel]:
    """Loss, validation, CORE, gradients and speed of a supervised stage, and how pairs are told apart; what was not
    recorded is left out."""
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
            *UPDATES,
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
    """Reward, length, how far the policy moved, speed, memory, and who waited; what was not recorded is left out."""
    shares = {"clipped_share": "tokens clipped", "zero_spread_share": "groups all alike", "truncated_share": "cut off"}
    speed = {"sampled_tokens_per_second": "sampled", "tokens_per_second": "trained"}
    reward = {"reward": "rollouts", "eval_reward": "held out"}
    several = {"turns": "turns", "tool_results": "tool results", "sequences": "sequences"}
    benchmarks = dict.fromkeys(line["benchmark"] for line in stage.lines if "benchmark" in line)
    scores = {f"benchmark_{name}": name for name in benchmarks}
    beside = {"reward": "reward", **stage.watched} if stage.watched else {}
    waits = {"seconds_samplers_wait": "samplers", "seconds_trainer_waits": "trainer"}
    memory = {"trainer_peak_bytes": "trainer", "sampler_peak_bytes": "samplers"}
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
        *UPDATES,
        ("Tokens a second", speed, {"from_zero": True}),
        (BUSY, waits, {"from_zero": True}),
        (MEMORY, memory, {"from_zero": True}),
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
            elif title == MEMORY:
                lines = {label: (xs, [y / 1e9 for y in ys]) for label, (xs, ys) in lines.items()}
            elif title == BUSY:
                seconds = dict(zip(*stage.curve("seconds_step"), strict=True))
                lines = {
                    label: (xs, [max(0.0, 1 - y / seconds[x]) if seconds.get(x) else math.nan for x, y in zip(xs, ys)])
                    for label, (xs, ys) in lines.items()
                }
            panels.append(Panel(title=title, x_label="step", lines=lines, **how))
    return panels


def _of_range(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / ((high - low) or 1.0) for value in values]


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


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Values with as many digits as a plot shows; None, a gap, for what is no number."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _trace(label: str, xs: Sequence[float], ys: Sequence[float], line: Mapping[str, Any]) -> dict[str, Any]:
    name = escape(shortened(label, LONGEST_LABEL))
    return {"name": name, "x": _numbers(xs), "y": _numbers(ys), "mode": "lines", "line": line}


@cache
def page_scripts() -> tuple[tuple[str, str], ...]:
    """Plotly's script and the page's own, each with the name by which a page's policy allows it and no other."""
    plotly = distribution("plotly").locate_file("plotly/package_data/plotly.min.js")  # importing it takes a second
    texts = [Path(str(path)).read_text(encoding="utf-8") for path in (plotly, TEMPLATES / "plots.js")]
    return tuple((text, f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'") for text in texts)
