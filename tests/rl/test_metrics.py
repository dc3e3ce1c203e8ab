"""Numbers of a step, on rollouts small enough to count by hand, and whether they say that a stage learned."""

import random
import re
from itertools import combinations

import pytest
from scipy.stats import linregress

from nanodag.evaluation.results import pass_at
from nanodag.rl.control.checks import warn_of_fall, warn_of_first_step
from nanodag.rl.rollouts import metrics
from nanodag.rl.rollouts.batch import Dropped, RolloutBatch
from tests.rl.rollouts import rollout


@pytest.mark.parametrize(("size", "solved"), [(4, 0), (4, 1), (5, 3), (8, 8)])
def test_pass_at_k_is_the_share_of_draws_of_k_with_a_right_one(size, solved):
    samples = [True] * solved + [False] * (size - solved)
    for k in range(1, size + 1):
        draws = [any(draw) for draw in combinations(samples, k)]
        assert pass_at(k, size, solved) == pytest.approx(sum(draws) / len(draws))


def test_numbers_of_rollouts_by_hand():
    group = [rollout("a", n, [1], [2] * (n + 1), reward=float(n == 0)) for n in range(4)]
    found = metrics.rollout_metrics([*group, *(rollout("b", n, [1], [2], reward=1.0) for n in range(2))])
    means = {"pass_at_1": (0.25 + 1) / 2, "pass_at_2": (0.5 + 1) / 2, "pass_at_4": 1.0, "pass_at_n": 1.0}
    means |= {"reward": 3 / 6, "pass_rate": 3 / 6, "zero_spread_share": 0.5, "response_tokens": 12 / 6}
    assert {name: found[name] for name in means} == pytest.approx(means) and "pass_at_8" not in found
    assert found["response_tokens_largest"] == 4.0
    assert metrics.rollout_metrics([rollout("a", 0, [1], [2])])["pass_at_n"] == 0.0


@pytest.mark.parametrize(
    ("token_ids", "share"),
    [([], 0.0), ([1, 1, 1], 0.0), ([*range(8)], 0.0), ([7] * 8, 0.8), ([1, 2] * 4, 0.6), ([1, 2] * 3, 1 / 3)],
)
def test_repetition_is_the_share_of_4_grams_that_came_before_and_most_of_a_response_is_counted(token_ids, share):
    assert metrics.repetition(token_ids) == pytest.approx(share)
    assert metrics.rollout_metrics([rollout("a", 0, [1], token_ids)])["repeated_share"] == float(share > 0.5)


def test_what_a_function_keeps_under_the_words_of_environments_is_no_number_and_ends_nothing():
    said = [{"metrics": {"left": 2.0}, "turns": 3}, {"metrics": {"left": "two"}, "turns": ["a", "b"]}, {"metrics": 1}]
    found = metrics.rollout_metrics([rollout("a", n, [1], [2], metadata=one) for n, one in enumerate(said)])
    assert (found["metric_left"], found["turns"]) == (2.0, 3.0)


def test_speeds_are_over_the_time_that_each_side_worked():
    sampled = {"sampled_tokens": 60.0, "seconds_generate": 2.0}
    values = {**sampled, "computed_tokens": 100.0, "scored_tokens": 50.0, "peak_flops": 12_000.0}
    found = metrics.speeds(values, {"train": 4.0, "trainer_waits": 99.0}, num_parameters=10, num_head_parameters=4)
    assert found == {"sampled_tokens_per_second": 30.0, "tokens_per_second": 25.0, "mfu": 0.15}  # 6 x 1,200 / 4 s
    assert metrics.speeds(sampled, {}, num_parameters=10, num_head_parameters=4) == {"sampled_tokens_per_second": 30.0}


@pytest.mark.parametrize(("num_kept", "reward", "told"), [
    (0, 0.0, "too hard for this model: take easier ones"), (2, 0.01, "too hard"), (1, 0.98, "too easy"), (3, 0.01, ""),
])  # fmt: skip
def test_the_first_rollouts_say_that_few_groups_teach_and_that_most_responses_were_cut(caplog, num_kept, reward, told):
    batch = RolloutBatch(kept=[(None, [])] * num_kept, dropped=[Dropped(None, [], "zero_spread")] * (16 - num_kept))
    values = {"truncated_share": 0.7, "reward": reward, "dropped_zero_spread": 16.0 - num_kept}
    warn_of_first_step(values, batch, max_new_tokens=64)
    *few, cut = (record.getMessage() for record in caplog.records)
    assert "70 % of the responses were cut at max_new_tokens 64" in cut
    assert len(few) == bool(told)
    for message in few:
        assert (
            f"Step 1: {num_kept} of 16 groups are left to learn from (dropped_zero_spread {16 - num_kept};" in message
        )
        assert told in message


def test_a_reward_that_falls_at_once_is_said_once_and_names_the_warm_up(caplog):
    first, less, fallen = {"low": 0.37, "high": 0.55}, {"low": 0.28, "high": 0.41}, {"low": 0.1, "high": 0.23}
    assert warn_of_fall(1, {}, first) is first
    assert warn_of_fall(2, first, less) is first and not caplog.records, "within noise"
    assert warn_of_fall(3, first, fallen) == {}
    assert warn_of_fall(4, {}, fallen) == {}, "said once; and a resumed stage knows nothing of step 1"
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("Step 3: the mean reward is at most 0.23; in step 1 it was at least 0.37.")
    assert "raise optimizer.warmup_steps" in said


def lines_of(rewards, share=0.2):
    steps = [{"event": "step", "step": n, "reward": r, "zero_spread_share": share} for n, r in enumerate(rewards, 1)]
    return [{"event": "eval", "step": 0, "eval_reward": 0.1}, *steps]


def noisy(slope, steps=100):
    noise = random.Random(1)
    return [0.4 + slope * n + noise.gauss(0, 0.05) for n in range(steps)]


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (noisy(0.002), None),
        (noisy(0.0), r"the reward stayed flat, 0\..*no trend beyond noise"),
        (noisy(-0.002), r"the reward fell, from 0\.4"),
        ([n / 10 for n in range(10)], None),  # a line without noise
        ([0.5, 0.4, 0.5], None),  # too few to speak of a trend
        ([], None),
    ],
)
def test_a_reward_that_rises_is_learning_and_one_that_only_wavers_or_falls_is_not(rewards, said):
    why = metrics.why_nothing_was_learned(metrics.learning_of(lines_of(rewards)))
    assert why == [] if said is None else re.match(said, *why)


def test_the_trend_is_the_line_of_least_squares_and_its_noise():
    # by hand, x = 1..8: sum of squares 42, of products 4
    found = metrics.learning_of(lines_of([0, 0, 1, 1, 0, 0, 1, 1]))
    assert found["reward_last"] - found["reward_first"] == pytest.approx(7 * 4 / 42)
    assert found["reward_p"] == pytest.approx(linregress(range(8), [0, 0, 1, 1, 0, 0, 1, 1]).pvalue)
    assert metrics.learning_of(lines_of([0.5] * 10))["reward_p"] == 1.0


def test_a_measure_that_is_not_trained_and_falls_while_the_reward_rises_is_said():
    praise = noisy(0.02)
    rising, falls = noisy(0.005), [*noisy(0.01)[:30], *reversed(noisy(0.01)[:30])]
    lines = [line | {"reward_exact": value} for line, value in zip(lines_of(praise), falls, strict=False)]
    (said,) = metrics.over_optimised(lines, {"reward_exact": "exact"})
    assert re.match(r"from step 2\d on the reward rose, .* and exact, which it does not see, fell, 0\.[5-7]", said)
    for values in (rising, noisy(0.0), falls[:30]):
        lines = [line | {"reward_exact": value} for line, value in zip(lines_of(praise), values, strict=False)]
        assert metrics.over_optimised(lines, {"reward_exact": "exact"}) == []
    early = [
        line | ({"benchmark_a": 0.9 - line["step"] / 200} if line["step"] % 10 == 0 else {})
        for line in lines_of(praise)
    ]
    begun = {"event": "eval", "step": 0, "benchmark_a": 0.9}
    assert metrics.over_optimised([begun, *early], {"benchmark_a": "a"})[0].startswith("from step 0 on the reward rose")
    draw, alarms = random.Random(3), 0
    for _ in range(100):  # what wanders without a trend, neighbours alike
        walk = [draw.gauss(0, 1)]
        for _ in range(199):
            walk.append(0.5 * walk[-1] + draw.gauss(0, 1))
        lines = [line | {"reward_exact": value} for line, value in zip(lines_of(noisy(0.02, 200)), walk, strict=False)]
        alarms += len(metrics.over_optimised(lines, {"reward_exact": "exact"}))
    assert alarms <= 8
    fallen = [line | {"reward_exact": value} for line, value in zip(lines_of(noisy(-0.02)), falls, strict=False)]
    assert metrics.over_optimised(fallen, {"reward_exact": "exact"}) == []  # both fell: that is no praise


def test_groups_all_alike_and_no_update_are_said():
    alike = metrics.learning_of(lines_of([0.0] * 3, share=1.0))
    (said,) = metrics.why_nothing_was_learned(alike)
    assert "in each group were all alike" in said
    assert metrics.why_nothing_was_learned({"version": 0} | alike) == ["no update of the weights was made."]
    assert metrics.why_nothing_was_learned({"version": 3}) == []
