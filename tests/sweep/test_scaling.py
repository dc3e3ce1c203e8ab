"""A scaling law: known constants found again, and what determines none refused."""

import math

import numpy as np
import pytest
import yaml
from scipy.optimize import minimize_scalar

import nanodag.cli.run  # noqa: F401 - before a test patches what it imports
from nanodag.cli.composed import scale
from nanodag.config import resolve
from nanodag.config.dial import num_parameters, shape_of
from nanodag.errors import ConfigError, SourceError
from nanodag.sweep.scaling import ScalingLaw, estimated, scaling_points, size_of
from tests.fake_stages import STAGES

KNOWN = {"E": 0.9, "A": 30.0, "alpha": 0.3, "B": 900.0, "beta": 0.55}
SIZES = (2e5, 7e5, 2e6, 5e6)
HORIZONS = (4e5, 8e5, 1.6e6, 3.2e6)
POINTS = [(n, d) for n in SIZES for d in HORIZONS]


@pytest.fixture
def project(tmp_path, no_settings):
    path = tmp_path / "pipeline.yaml"
    held_out = {**STAGES["pretrain"], "data": [{"url": "file:text.txt", "held_out": 0.1}]}
    preset = {"stages": {**STAGES, "pretrain": held_out}}
    path.write_text(yaml.safe_dump({"default": "tiny", "presets": {"tiny": preset}}, sort_keys=False))
    return path


def known(n, d):
    return KNOWN["E"] + KNOWN["A"] / n ** KNOWN["alpha"] + KNOWN["B"] / d ** KNOWN["beta"]


def law_of(points, noise, seed=1):
    spread = np.random.default_rng(seed).normal(0, noise, len(points))
    return ScalingLaw(
        *zip(*points, strict=True), [known(*p) * math.exp(e) for p, e in zip(points, spread, strict=True)]
    )


def test_losses_of_known_constants_give_them_back():
    law = law_of(POINTS, 0.0)
    assert {name: number[0] for name, number in law.numbers.items()} == pytest.approx(KNOWN, rel=1e-3)
    assert law.losses(1e7, 5e6)[0] == pytest.approx(known(1e7, 5e6), rel=1e-6)
    parameters = law.best_size(1e14)[0]
    best = minimize_scalar(lambda n: known(math.exp(n), 1e14 / 6 / math.exp(n)), bounds=(8, 25), method="bounded")
    assert math.log(parameters) == pytest.approx(best.x, abs=1e-3), "as a search without the formula"
    assert law.best_ratio(parameters)[0] == pytest.approx(1e14 / 6 / parameters**2, rel=1e-6)


def test_with_noise_they_lie_in_the_intervals_and_fewer_points_make_wider_ones():
    law, few = law_of(POINTS, 0.003), law_of([p for p in POINTS if 5e6 not in p and 3.2e6 not in p], 0.003)
    for name, (_, low, high) in law.numbers.items():
        assert low < KNOWN[name] < high, name
    widths = []
    for each in (law, few):
        _, low, high = estimated(each.losses(1e7, 1.6e6))
        assert low < known(1e7, 1.6e6) < high
        widths.append(high - low)
    assert 0.001 < law.spread < 0.006 and widths[1] > 1.5 * widths[0] > 0.01


@pytest.mark.parametrize(
    ("points", "losses", "error", "said"),
    [
        ([(1e6, 1e6)], [2.0], ConfigError, "Found 1 different points of 1 sizes and 1 horizons; give 6 or more"),
        (POINTS[:8], [2.0] * 8, ConfigError, "of 2 sizes and 4 horizons"),
        (POINTS, [2.0] * 15 + [math.nan], SourceError, "a loss of nan"),
        (POINTS, [2.0] * 15 + [0.0], SourceError, "a loss of 0.0"),
    ],
)
def test_what_determines_no_law_is_refused_in_words(points, losses, error, said):
    with pytest.raises(error, match=said):
        ScalingLaw(*zip(*points, strict=True), losses)


def test_points_spend_their_budgets_or_have_cuts_of_the_presets_horizon(project):
    of_two = num_parameters(shape_of(2), 512)["matrices"] + 512 * 128
    by_flops = scaling_points(project, "tiny", [], "pretrain", "1,2", "", str(6e8 * of_two))
    assert by_flops[1] == "pretrain.shape.depth=2 pretrain.horizon_tokens=100000000"
    cut = scaling_points(project, "tiny", ["pretrain.horizon_tokens=4000"], "pretrain", "1,2", "", "")
    assert [setting.partition("tokens=")[2] for setting in cut] == ["1000", "2000", "4000"] * 2
    nothing_held_out = (["pretrain.validation_tokens=0"], ["pretrain.data=[file:text.txt]"])
    for stage, overrides in (("sft", []), ("pretrane", []), *(("pretrain", given) for given in nothing_held_out)):
        with pytest.raises(ConfigError, match=f"Stage '{stage}' of preset tiny does not train a model from random"):
            size_of(resolve(project, "tiny", overrides).pipeline, stage)
    ended = ["pretrain.horizon_tokens=4000", "pretrain.max_steps=3", "pretrain.batch_tokens=64"]
    assert size_of(resolve(project, "tiny", ended).pipeline, "pretrain")[1] == 3 * 64, (
        "what is trained, not what was to be"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"depths": "1,2"}, "Found 6 different points of 2 sizes and 3 horizons"),
        ({"depths": "1,x"}, "--depths '1,x': give numbers above 0"),
        ({"target_flops": "1e9,nan"}, "--target-flops '1e9,nan'"),
        ({"depths": "1,2,2.5"}, "depth"),
        ({"depths": ""}, "A sweep needs a grid"),
        ({"predict": 200}, "depth"),
        ({"predict": 2}, "--predict 2: a point trains that depth"),
    ],
)
def test_scale_refuses_what_fits_no_law_before_anything_starts(project, options, said):
    with pytest.raises(ConfigError, match=said):
        scale(preset="tiny", file=str(project), name="s", **options)
