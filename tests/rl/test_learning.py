"""Whether an RL stage learned anything: from rewards whose trend is known."""

import random

import pytest
from scipy.stats import linregress

from nanodag.rl.rollouts.metrics import learning_of, why_nothing_was_learned


def lines_of(rewards, share=0.2):
    steps = [{"event": "step", "step": n, "reward": r, "zero_spread_share": share} for n, r in enumerate(rewards, 1)]
    return [{"event": "eval", "step": 0, "eval_reward": 0.1}, *steps]


def noisy(slope, steps=100):
    noise = random.Random(1)
    return [0.4 + slope * n + noise.gauss(0, 0.05) for n in range(steps)]


def test_a_reward_that_rises_is_learning_and_one_that_only_wavers_is_not():
    rises, wavers = learning_of(lines_of(noisy(0.002))), learning_of(lines_of(noisy(0.0)))
    assert why_nothing_was_learned(rises) == [] and rises["reward_p"] < 1e-6
    assert rises["reward_last"] - rises["reward_first"] == pytest.approx(0.198, abs=0.04)
    (said,) = why_nothing_was_learned(wavers)
    assert said.startswith("the reward stayed flat, 0.") and "no trend beyond noise" in said


def test_a_reward_that_falls_is_said_to_fall():
    (said,) = why_nothing_was_learned(learning_of(lines_of(noisy(-0.002))))
    assert said.startswith("the reward fell, from 0.4")


def test_the_trend_is_the_line_of_least_squares_and_its_noise():
    # by hand, x = 1..8: sum of squares 42, of products 4
    found = learning_of(lines_of([0, 0, 1, 1, 0, 0, 1, 1]))
    assert found["reward_last"] - found["reward_first"] == pytest.approx(7 * 4 / 42)
    assert found["reward_p"] == pytest.approx(linregress(range(8), [0, 0, 1, 1, 0, 0, 1, 1]).pvalue)


def test_the_same_reward_in_every_step_is_flat_and_a_line_without_noise_is_not():
    assert learning_of(lines_of([0.5] * 10))["reward_p"] == 1.0
    assert why_nothing_was_learned(learning_of(lines_of([n / 10 for n in range(10)]))) == []


def test_groups_all_alike_and_no_update_are_said():
    alike = learning_of(lines_of([0.0] * 3, share=1.0))
    assert why_nothing_was_learned(alike) == [
        "the rewards in each group were all alike, so there was nothing to prefer."
    ]
    assert why_nothing_was_learned({"version": 0} | alike) == ["no update of the weights was made."]


def test_a_few_steps_are_too_few_to_speak_of_a_trend():
    assert why_nothing_was_learned(learning_of(lines_of([0.5, 0.4, 0.5]))) == []
    assert why_nothing_was_learned(learning_of([])) == [] == why_nothing_was_learned({"version": 3})
