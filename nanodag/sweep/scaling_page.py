"""The scaling law on a sweep's page: what it predicts, its numbers, and the runs that it comes from."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanodag.errors import ConfigError, SourceError
from nanodag.errors.words import listed
from nanodag.report import words
from nanodag.report.page import PageSection, Part
from nanodag.report.plots import Panel, panels_svg
from nanodag.report.tables import Table, cells
from nanodag.sweep.scaling import Estimate, ScalingLaw, estimated, size_of
from nanodag.sweep.sweep_page import PointRow
from nanodag.sweep.sweep_run import Sweep

LOSS = "validation_bits_per_byte"
LEAST_CORE = 4  # points: a line, and what lies about it
FAR = 4.0  # times the largest model that ran
HEADERS = ("point", "depth", "parameters", "tokens", "tokens a parameter", "measured", "by the law")
NOTE = (
    "L(N, D) = E + A / N^alpha + B / D^beta: held-out bits a byte over N parameters (matrices and output head) and D "
    "tokens; FLOPs are 6 N D. Intervals are of 95 %; a prediction's has the noise of one run in it. It holds for these "
    "data, this tokenizer and recipe, near these sizes."
)


def law_section(name: str, sweep: Sweep, rows: Sequence[PointRow]) -> tuple[PageSection, dict[str, Any]]:
    """Section and JSON of the law of a sweep's points; both say why, where there is none. name: of the sweep."""
    try:
        points = [_measured(sweep, row) for row in rows]
        law = ScalingLaw(*([point[field] for point in points] for field in ("parameters", "tokens", "loss")))
    except (ConfigError, SourceError) as error:
        lines = [f"No scaling law: {error}"]
        return PageSection(title="Scaling law", note=lines[0]), {"run": name, "is_fitted": False, "lines": lines}
    assert sweep.predicted is not None
    parameters, tokens = size_of(sweep.predicted, sweep.stage)
    losses, ratio = law.losses(parameters, tokens), law.best_ratio(parameters)
    predicted: dict[str, Any] = {"number": "predicted", "depth": sweep.predicted.stages[sweep.stage].shape.depth}
    predicted |= {"parameters": parameters, "tokens": tokens, "loss": estimated(losses), "core": _core(points, losses)}
    budgets = sorted({6 * point["parameters"] * point["tokens"] for point in [*points, predicted]})
    best = {flops: law.best_size(flops) for flops in (budgets[0], budgets[-1])}
    core = f", CORE {_said(predicted['core'])}" if predicted["core"] else ""
    lines = [
        f"Depth {predicted['depth']}, {words.count(tokens)} tokens: {_said(predicted['loss'])} bits a byte{core}.",
        f"The dial would take {_said(ratio)} tokens a parameter for that depth: tokens_per_parameter.",
        *(f"{words.count(f)}FLOPs: best {_said(n)} parameters, {_said(d)} tokens." for f, (n, d) in best.items()),
        f"The law: {listed(f'{number} {_said(value)}' for number, value in law.numbers().items())}.",
        *_cautions(law, points, parameters, ratio),
    ]
    found = {"run": name, "stage": sweep.stage, "is_fitted": True, "lines": lines, "law": law.numbers(), "best": best}
    found |= {"spread": law.spread, "tokens_per_parameter": ratio, "predicted": predicted, "points": points}
    body = []
    for point in [*points, predicted]:
        n, d = point["parameters"], point["tokens"]
        measured = "" if point is predicted else f"{point['loss']:.4f}"
        by_law = _said(estimated(law.losses(n, d)))
        body.append(
            cells(
                *(str(point[field]) for field in ("number", "depth")),
                *map(words.count, (n, d, d / n)),
                measured,
                by_law,
            )
        )
    table = Table(headers=HEADERS, rows=body, numeric=tuple(range(1, len(HEADERS))))
    parts = [Part(svg=panels_svg([_panel(law, points, predicted)], name="law")), Part(table=table)]
    return PageSection(title="Scaling law", note=" ".join([*lines, NOTE]), parts=parts), found


def _measured(sweep: Sweep, row: PointRow) -> dict[str, Any]:
    """A point's sizes and scores. Raises SourceError for one that failed, or has no held-out loss."""
    number, artifact, stage = row.point.number, row.artifact, row.point.stages[sweep.stage]
    if artifact is None or LOSS not in row.metrics:
        raise SourceError(
            f"Point {number} failed, or none of its data are held out, so that it has no {LOSS}; a law without it may "
            "be bent. Mend that, and resume the sweep."
        )
    about = {"number": number, "depth": sweep.pipeline.stages[stage].shape.depth, "key": artifact.key}
    about |= {"parameters": size_of(sweep.pipeline, stage)[0], "tokens": int(artifact.cost["tokens"])}
    return {**about, "attempt": artifact.attempt, "loss": row.metrics[LOSS], "core": row.metrics.get("core")}


def _cautions(law: ScalingLaw, points: list[dict[str, Any]], parameters: int, ratio: Estimate) -> list[str]:
    """Sentences on what the points leave open."""
    weak = [name for name, number in law.numbers().items() if number.high - number.low > abs(number.value)]
    ratios = [point["tokens"] / point["parameters"] for point in points]
    times, cautions = parameters / max(point["parameters"] for point in points), []
    if weak:
        cautions.append(
            f"Weakly determined, with an interval wider than itself, by {len(points)} points: {listed(weak)}."
        )
    if not min(ratios) <= ratio.value <= max(ratios):
        cautions.append(f"That ratio is extrapolated: points had {min(ratios):.3g} to {max(ratios):.3g}.")
    if times > FAR:
        cautions.append(f"That depth has {times:.3g} times the parameters of the largest point: far for a law.")
    return cautions


def _core(points: list[dict[str, Any]], losses: np.ndarray) -> Estimate | None:
    """CORE at losses, by a line over the points' losses; None where too few points measured it."""
    measured = np.array([(point["loss"], point["core"]) for point in points if point["core"] is not None])
    if len(measured) < LEAST_CORE:
        return None
    (xs, ys), draw = measured.T, np.random.default_rng(0)
    line, covariance = np.polyfit(xs, ys, 1, cov=True)
    slopes, heights = np.vstack([line, draw.multivariate_normal(line, covariance, len(losses) - 1)]).T
    noise = np.std(ys - np.polyval(line, xs), ddof=2) * draw.standard_normal(len(losses))
    return estimated(slopes * losses + heights + np.where(np.arange(len(losses)), noise, 0.0))


def _panel(law: ScalingLaw, points: list[dict[str, Any]], predicted: dict[str, Any]) -> Panel:
    """Measured losses over tokens, a line a depth, and the predicted depth's, each in the band of the law."""
    horizons = sorted({point["tokens"] for point in [*points, predicted]})
    lines, intervals = {}, {}
    for depth in sorted({point["depth"] for point in points}):
        mine = sorted((p for p in points if p["depth"] == depth), key=lambda p: p["tokens"])
        lines[f"depth {depth}"] = [(p["parameters"], p["tokens"], p["loss"]) for p in mine]
    lines[f"depth {predicted['depth']}, predicted"] = [(predicted["parameters"], d, math.nan) for d in horizons]
    for label, shown in lines.items():
        values, low, high = zip(*(estimated(law.losses(n, d)) for n, d, _ in shown), strict=True)
        ys = [value if math.isnan(y) else y for value, (*_, y) in zip(values, shown, strict=True)]
        lines[label], intervals[label] = ([math.log10(d) for _, d, _ in shown], ys), (low, high)
    ticks = [(math.log10(tokens), words.count(tokens)) for tokens in horizons[:: max(1, len(horizons) // 4)]]
    title = "Held out (bits a byte)"
    return Panel(title=title, x_label="tokens", lines=lines, marked=tuple(lines), intervals=intervals, ticks=ticks)


def _said(estimate: Estimate) -> str:
    value, low, high = (words.count(x) if abs(x) >= 1000 else f"{x:.4g}" for x in estimate)
    return f"{value} ({low} to {high})"
