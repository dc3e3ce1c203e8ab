"""A scaling law of runs: Chinchilla's fit of the loss over parameters and tokens, the best size for a budget, and the
loss that another size would reach, each with its interval.

    L(N, D) = E + A / N^alpha + B / D^beta        FLOPs: 6 N D, attention left out

The sum of Huber losses of log L is least, by L-BFGS from a grid of starts. Intervals are of 95 %: losses are drawn anew
about the fit and fitted again. Their spread is that of the points about the fit, itself drawn (chi-squared, of as many
degrees as there are points beyond five numbers), so that few points make wide intervals.

Source: Hoffmann et al., arXiv:2203.15556, approach 3 and appendix D.2.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from scipy.optimize import minimize

from nanodag.config import Pipeline, resolve
from nanodag.config.kinds.training import PretrainStage
from nanodag.config.model_size import ModelSize, model_of
from nanodag.errors import ConfigError, SourceError

NUMBERS = ("E", "A", "alpha", "B", "beta")
LEAST = 3  # sizes, and horizons: two leave E and an exponent open
HUBER = 1e-3  # of log L, as in the source
NUM_DRAWS = 200
BOUNDS = ((-30.0, 9.0), (-30.0, 9.0), (0.01, 3.0), (-30.0, 9.0), (0.01, 3.0))
ENDLESS = 99.0  # a logarithm: an exponent near 0 puts an optimum out of sight, and not out of floats

Estimate = tuple[float, float, float]
"""A value, and the ends of its 95 % interval."""


def size_of(pipeline: Pipeline, name: str) -> tuple[int, int]:
    """Parameters in matrices and output head, as the dial's ratio counts them, and the horizon in tokens.

    Raises ConfigError for a stage that does not begin at random weights, or measures no held-out loss."""
    stage = cast("PretrainStage", pipeline.stages.get(name))
    if stage is None or not stage.is_from_scratch or not stage.measures_held_out:
        raise ConfigError(
            f"Stage {name!r} of preset {pipeline.preset} does not train a model from random weights with a source that "
            "has held_out, and validation_tokens above 0; name a stage that does: --stage."
        )
    model = cast("ModelSize", model_of(pipeline, name))
    tokens = min(int(stage.horizon_tokens), stage.max_steps * int(stage.batch_tokens) or int(stage.horizon_tokens))
    return model.parameters["matrices"] + model.vocabulary * model.shape.width, tokens


def scaling_points(
    file: Path, preset: str, overrides: Sequence[str], stage: str, depths: str, tokens: str, target_flops: str
) -> list[str]:
    """Overrides of each point: every depth at every horizon and for every budget; without any at a quarter, a half and
    the whole of the preset's horizon for it. depths, tokens, target_flops: numbers with commas between them."""
    points = []
    for depth in numbers_of("--depths", depths):
        setting = f"{stage}.shape.depth={depth:g}"
        parameters, whole = size_of(resolve(file, preset, [*overrides, setting]).pipeline, stage)
        spent = [flops / (6 * parameters) for flops in numbers_of("--target-flops", target_flops)]
        horizons = [*numbers_of("--tokens", tokens), *spent] or [whole / 4, whole / 2, whole]
        points += [f"{setting} {stage}.horizon_tokens={horizon:.0f}" for horizon in horizons]
    return points


def numbers_of(option: str, text: str) -> list[float]:
    """Numbers above 0 with commas between them. Raises ConfigError, which names the option."""
    try:
        numbers = [float(number) for number in text.split(",") if text]
    except ValueError:
        numbers = [0.0]
    if all(0 < number < math.inf for number in numbers):
        return numbers
    raise ConfigError(f"{option} {text!r}: give numbers above 0 with commas between them, as 1,2,3.")


def check_sizes(sizes: Sequence[tuple[int, int]]) -> None:
    """Raise ConfigError where points of such parameters and tokens could not determine a law and its intervals. Numbers
    that differ by a few percent count once."""
    steps = {(round(20 * math.log(parameters)), round(20 * math.log(tokens))) for parameters, tokens in sizes}
    num_sizes, num_horizons = (len(set(each)) for each in zip(*steps, strict=True))
    if len(steps) <= len(NUMBERS) or min(num_sizes, num_horizons) < LEAST:
        raise ConfigError(
            f"A scaling law has {len(NUMBERS)} numbers ({', '.join(NUMBERS)}), and one point more gives the intervals. "
            f"Found {len(steps)} different points of {num_sizes} sizes and {num_horizons} horizons; give "
            f"{len(NUMBERS) + 1} or more, of {LEAST} depths and {LEAST} horizons at least."
        )


def estimated(values: np.ndarray) -> Estimate:
    """values: the fit's, then the draws'."""
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return float(values[0]), float(low), float(high)


class ScalingLaw:
    """The law of measured runs. parameters, tokens, losses: (N,) each.

    Raises SourceError for a loss that is no positive number, ConfigError for points that determine no law."""

    def __init__(self, parameters: Sequence[int], tokens: Sequence[int], losses: Sequence[float]) -> None:
        if wrong := [loss for loss in losses if not 0 < loss < math.inf]:
            raise SourceError(f"A point has a loss of {wrong[0]}; a law is of positive numbers. Mend or leave it out.")
        check_sizes(list(zip(parameters, tokens, strict=True)))
        # Logarithms about their means: the numbers of the law then hardly depend on each other, and L-BFGS converges.
        self._middle = np.log([parameters, tokens]).mean(axis=1)
        terms, measured = self._terms(parameters, tokens), np.log(losses)
        levels = measured.mean() + np.log((0.1, 0.6))
        starts = itertools.product(levels, levels, (0.2, 0.6), levels, (0.2, 0.6))
        best = min((_fitted(start, terms, measured) for start in starts), key=lambda found: found[0])[1]
        fitted, draw, degrees = np.logaddexp.reduce(terms @ best), np.random.default_rng(0), len(losses) - len(NUMBERS)
        self.spread = math.sqrt(((fitted - measured) ** 2).sum() / degrees)
        """Of runs about the law, as a share of the loss."""
        spreads = self.spread * np.sqrt(degrees / draw.chisquare(degrees, NUM_DRAWS))
        drawn = fitted + spreads[:, None] * draw.standard_normal((NUM_DRAWS, len(losses)))
        e, a, alpha, b, beta = np.array([best, *(_fitted(best, terms, one)[1] for one in drawn)]).T
        self._values, self._noise = (e, a, alpha, b, beta), np.array([0.0, *spreads * draw.standard_normal(NUM_DRAWS)])
        of_a, of_b = np.exp(a + alpha * self._middle[0]), np.exp(b + beta * self._middle[1])
        self.numbers = dict(zip(NUMBERS, map(estimated, (np.exp(e), of_a, alpha, of_b, beta)), strict=True))
        """E, A, alpha, B and beta, each with its interval."""

    def _terms(self, parameters: Sequence[float], tokens: Sequence[float]) -> np.ndarray:
        """(3, N, 5): times the law's numbers about the middle, logarithms of E, A / N^alpha and B / D^beta."""
        n, d = np.log([parameters, tokens]) - self._middle[:, None]
        terms = np.zeros((3, len(n), len(NUMBERS)))
        terms[(0, 1, 2), :, (0, 1, 3)], terms[1, :, 2], terms[2, :, 4] = 1.0, -n, -d
        return terms

    def losses(self, parameters: float, tokens: float) -> np.ndarray:
        """Loss of one run of that size, by the fit and by each draw, these with the noise of a run."""
        return np.exp(np.logaddexp.reduce(self._terms([parameters], [tokens]) @ self._values)[0] + self._noise)

    def best_ratio(self, parameters: float) -> Estimate:
        """Tokens a parameter at which a model of that size is the best for its FLOPs."""
        _, a, alpha, b, beta = self._values
        size = math.log(parameters)
        tokens = (b - a + alpha * (size - self._middle[0]) + np.log(beta / alpha)) / beta + self._middle[1]
        return estimated(np.exp(np.clip(tokens - size, -ENDLESS, ENDLESS)))

    def best_size(self, flops: float) -> Estimate:
        """Parameters of the least loss that a budget buys; what is left of it are tokens."""
        _, a, alpha, b, beta = self._values
        left = math.log(flops / 6) - self._middle.sum()
        size = (a - b + beta * left + np.log(alpha / beta)) / (alpha + beta) + self._middle[0]
        return estimated(np.exp(np.clip(size, -ENDLESS, ENDLESS)))


def _fitted(start: Sequence[float] | np.ndarray, terms: np.ndarray, measured: np.ndarray) -> tuple[float, np.ndarray]:
    how = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-13, "gtol": 1e-7}
    found = minimize(_huber, start, (terms, measured), "L-BFGS-B", jac=True, bounds=BOUNDS, options=how)
    return float(found.fun), found.x


def _huber(numbers: np.ndarray, terms: np.ndarray, measured: np.ndarray) -> tuple[float, np.ndarray]:
    """Sum of Huber losses in units of HUBER, and its gradient."""
    parts = terms @ numbers
    log_loss = np.logaddexp.reduce(parts)
    off = (log_loss - measured) / HUBER
    clipped = np.clip(off, -1, 1)
    slopes = np.exp(parts - log_loss) * clipped / HUBER
    return float((clipped * (off - clipped / 2)).sum()), np.einsum("tn,tnk->k", slopes, terms)
