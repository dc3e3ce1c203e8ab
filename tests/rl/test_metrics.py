"""What the numbers of a step mean, on rollouts small enough to count by hand."""

from dataclasses import replace
from itertools import combinations

import pytest

from nanodag.rl.control.checks import warn_of_first_step
from nanodag.rl.rollouts.metrics import pass_at, repetition, rollout_metrics, speeds
from tests.rl.models import rollout


@pytest.mark.parametrize(("size", "solved"), [(4, 0), (4, 1), (5, 3), (8, 8)])
def test_pass_at_k_is_the_share_of_draws_of_k_with_a_right_one(size, solved):
    samples = [True] * solved + [False] * (size - solved)
    for k in range(1, size + 1):
        draws = [any(draw) for draw in combinations(samples, k)]
        assert pass_at(k, num_samples=size, num_solved=solved) == pytest.approx(sum(draws) / len(draws))


def test_pass_at_k_is_a_mean_over_groups_large_enough():
    group = [rollout("a", n, [1], [2], reward=float(n == 0)) for n in range(4)]
    small = [rollout("b", n, [1], [2], reward=1.0) for n in range(2)]
    found = rollout_metrics([*group, *small])
    assert found["pass_at_1"] == pytest.approx((0.25 + 1) / 2) and found["pass_at_2"] == pytest.approx((0.5 + 1) / 2)
    assert found["pass_at_4"] == 1.0 and "pass_at_8" not in found
    assert found["pass_rate"] == pytest.approx(3 / 6) and found["pass_at_n"] == 1.0


@pytest.mark.parametrize(
    ("token_ids", "share"), [([], 0.0), ([1, 1, 1], 0.0), ([1, 2, 3, 4, 5], 0.0), ([7] * 8, 0.8), ([1, 2] * 4, 0.6)]
)
def test_repetition_is_the_share_of_4_grams_that_came_before(token_ids, share):
    assert repetition(token_ids) == pytest.approx(share)


def test_repeated_share_counts_responses_that_are_mostly_repetition():
    found = rollout_metrics(
        [rollout("a", 0, [1], [7] * 8, reward=0.0), rollout("a", 1, [1], list(range(8)), reward=1.0)]
    )
    assert found["repeated_share"] == 0.5


def test_what_a_function_keeps_under_the_words_of_environments_is_no_number_and_ends_nothing():
    said = [{"metrics": {"left": 2.0}, "turns": 3}, {"metrics": {"left": "two"}, "turns": ["a", "b"]}, {"metrics": 1}]
    found = rollout_metrics(
        [replace(rollout("a", n, [1], [2], reward=0.0), metadata=one) for n, one in enumerate(said)]
    )
    assert (found["metric_left"], found["turns"]) == (2.0, 3.0)


def test_speeds_are_over_the_time_that_each_side_worked():
    sampled = {"sampled_tokens": 60.0, "seconds_generate": 2.0}
    values = {**sampled, "computed_tokens": 100.0, "scored_tokens": 50.0, "peak_flops": 12_000.0}
    found = speeds(values, {"train": 4.0, "trainer_waits": 99.0}, num_parameters=10, num_head_parameters=4)
    assert found == {"sampled_tokens_per_second": 30.0, "tokens_per_second": 25.0, "mfu": 0.15}  # 6 x 1,200 / 4 s
    assert speeds(sampled, {}, num_parameters=10, num_head_parameters=4) == {"sampled_tokens_per_second": 30.0}


def test_the_first_step_says_that_nothing_was_trained_and_that_most_responses_were_cut(caplog):
    values = {"truncated_share": 0.7, "reward": 0.25, "dropped_no_spread": 8.0}
    warn_of_first_step(values, is_trained=False, max_new_tokens=64)
    nothing, cut = (record.getMessage() for record in caplog.records)
    assert "Step 1 trained nothing" in nothing and "dropped_no_spread 8; mean reward 0.25" in nothing
    assert "70 % of the responses were cut at max_new_tokens 64" in cut
    caplog.clear()
    warn_of_first_step({"truncated_share": 0.4, "reward": 0.25}, is_trained=True, max_new_tokens=64)
    assert not caplog.records
