"""The scaling law on a sweep's page: what it predicts, its numbers, and the runs that it comes from."""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from nanodag.config.kinds.training import PretrainStage
from nanodag.errors import ConfigError, SourceError
from nanodag.errors.words import listed
from nanodag.report import words
from nanodag.report.page import NOTES, PageSection, Part
from nanodag.report.plots import Panel
from nanodag.report.tables import Table, cells
from nanodag.sweep.scaling import Estimate, ScalingLaw, estimated, size_of
from nanodag.sweep.sweep_page import PointRow
from nanodag.sweep.sweep_run import Sweep

TITLE, LOSS = "Scaling law", "validation_bits_per_byte"
LEAST_CORE = 4  # points: a line, and what lies about it
NOTHING = 1e-6  # an E that the fit pushed to its bound
FAR = 4.0  # times the largest model or horizon that ran, or less than the shortest by as much


def law_section(name: str, sweep: Sweep, rows: Sequence[PointRow]) -> tuple[PageSection, dict[str, Any]]:
    """Section and JSON of the law of a sweep's points; both say why, where there is none. name: of the sweep."""
    try:
        points = [_measured(sweep, row) for row in rows]
        law = ScalingLaw(*([point[field] for point in points] for field in ("parameters", "tokens", "loss")))
    except (ConfigError, SourceError) as error:
        lines = [f"No scaling law: {error}"]
        return PageSection(title=TITLE, note=lines[0]), {"run": name, "is_fitted": False, "lines": lines}
    assert sweep.predicted is not None
    depth = cast("PretrainStage", sweep.predicted.stages[sweep.stage]).shape.depth
    parameters, tokens = size_of(sweep.predicted, sweep.stage)
    losses, ratio, flops = law.losses(parameters, tokens), law.best_ratio(parameters), 6 * parameters * tokens
    loss, core, size = estimated(losses), _core(points, losses), law.best_size(flops)
    predicted = {"depth": depth, "parameters": parameters, "tokens": tokens, "loss": loss, "core": core}
    ratios = [point["tokens"] / point["parameters"] for point in points]
    weak = [name for name, (value, low, high) in law.numbers.items() if high - low > value or value < NOTHING]
    larger, longer = (predicted[name] / max(point[name] for point in points) for name in ("parameters", "tokens"))
    cautions = []  # sentences on what the points leave open
    if weak:
        cautions.append(
            f"Weakly determined by {len(points)} points, an interval wider than itself or nothing left: {listed(weak)}."
        )
    if max(larger, longer, min(point["tokens"] for point in points) / tokens) > FAR:
        times = f"{larger:.3g} times the parameters and {longer:.3g} times the tokens"
        cautions.append(f"It has {times} of the largest point: far for a law.")
    lines = [
        f"Depth {depth}, {words.count(parameters)} parameters, {words.count(tokens)} tokens: {_said(loss)} bits a byte"
        + (f", CORE {_said(core)}." if core else "."),
        f"The best size for its {words.count(flops)}FLOPs: {_said(size)} parameters.",
        f"The dial would take {_said(ratio)} tokens a parameter for that depth: tokens_per_parameter."
        if min(ratios) <= ratio[0] <= max(ratios)
        else f"No ratio for the dial: the law's is extrapolated, {_said(ratio)} tokens a parameter for that depth, and "
        f"points had {min(ratios):.3g} to {max(ratios):.3g}.",
        f"The law: {listed(f'{number} {_said(value)}' for number, value in law.numbers.items())}.",
        *cautions,
    ]
    found = {"run": name, "stage": sweep.stage, "is_fitted": True, "lines": lines, "law": law.numbers, "points": points}
    found |= {"spread": law.spread, "predicted": predicted, "tokens_per_parameter": ratio}
    found |= {"best_parameters": {flops: size}}
    table = Table(headers=["what it says"], rows=[cells(line) for line in lines])
    panels = [_panel(law, [*points, {**predicted, "loss": loss[0]}], depth)]
    return PageSection(title=TITLE, note=NOTES["scaling law"], parts=[Part(table=table), Part(panels=panels)]), found


def _measured(sweep: Sweep, row: PointRow) -> dict[str, Any]:
    """A point's sizes and scores. Raises SourceError for one that failed, or has no held-out loss."""
    number, artifact, stage = row.point.number, row.artifact, row.point.stages[sweep.stage]
    if artifact is None or LOSS not in row.metrics:
        raise SourceError(
            f"Point {number} failed, or none of its data are held out, so that it has no {LOSS}; a law without it may "
            "be bent. Mend that, and resume the sweep."
        )
    depth = cast("PretrainStage", sweep.pipeline.stages[stage]).shape.depth
    about = {"number": number, "depth": depth, "key": artifact.key}
    about |= {"parameters": size_of(sweep.pipeline, stage)[0], "tokens": int(artifact.cost["tokens"])}
    return {**about, "attempt": artifact.attempt, "loss": row.metrics[LOSS], "core": row.metrics.get("core")}


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


def _panel(law: ScalingLaw, points: list[dict[str, Any]], predicted: int) -> Panel:
    """Losses over tokens, a line a depth, in the band of the law. predicted: the depth whose loss is the law's."""
    lines, intervals = {}, {}
    for depth in sorted({point["depth"] for point in points}):
        mine = sorted((point for point in points if point["depth"] == depth), key=lambda point: point["tokens"])
        label = f"depth {depth}, predicted" if depth == predicted else f"depth {depth}"
        lines[label] = [math.log10(point["tokens"]) for point in mine], [point["loss"] for point in mine]
        bands = [estimated(law.losses(point["parameters"], point["tokens"])) for point in mine]
        intervals[label] = [low for _, low, _ in bands], [high for *_, high in bands]
    # Runs of one horizon differ by a few tokens, and share a tick.
    horizons = list({round(20 * math.log(point["tokens"])): point["tokens"] for point in points}.values())
    ticks = [(math.log10(tokens), words.count(tokens)) for tokens in horizons[:: max(1, len(horizons) // 4)]]
    title = "Held out (bits a byte)"
    return Panel(title=title, x_label="tokens", lines=lines, marked=tuple(lines), intervals=intervals, ticks=ticks)


def _said(estimate: Estimate) -> str:
    value, low, high = (words.count(x) if abs(x) >= 1000 else f"{x:.4g}" for x in estimate)
    return f"{value} ({low} to {high})"
