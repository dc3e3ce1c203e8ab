"""Which groups are trained on, and what is taken off their rewards first."""

import itertools

import pytest

from nanodag import registry as entries
from nanodag.rl.rollouts.metrics import drop_counts
from tests.rl.fakes import STOP, FakePool, FakeSampler, answers, cursor_over, dropped, kept, step
from tests.rl.rollouts import rollout


def group(*rewards: float, responses=((2,), (2, 3), (2, 3, 4))):
    texts = itertools.cycle(responses)
    return [rollout("a", index, [1], next(texts), reward=reward) for index, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("name", "options", "members", "reason"),
    [
        ("nonzero_spread", {}, group(1, 1, 1), "zero_spread"),
        ("nonzero_spread", {}, group(1, 0, 1), None),
        ("mean_reward", {"lowest": 0.5}, group(1, 0, 0), "reward_too_low"),
        ("mean_reward", {"lowest": 0.5}, group(1, 0), None),
        ("mean_reward", {"highest": 0.6}, group(1, 1, 0), "reward_too_high"),
        ("length", {"lowest": 2.5}, group(1, 0, 1), "too_short"),
        ("length", {"highest": 1.5}, group(1, 0, 1), "too_long"),
        ("length", {"lowest": 2, "highest": 2}, group(1, 0, 1), None),
        ("length", {"truncated": 0.5}, group(1, 0, 1), None),
        ("diversity", {"lowest": 0.5}, group(1, 0, 1, 0, responses=((2,),)), "not_diverse"),
        ("diversity", {"lowest": 0.5}, group(1, 0, 1, 0, responses=((2,), (3,))), None),
    ],
)
def test_a_filter_drops_a_group_for_its_reason(name, options, members, reason):
    assert entries.load("filter", name, options)(members) == reason


def test_every_drop_is_counted_by_the_first_filter_that_says_so(tmp_path):
    filters = ["nonzero_spread", {"name": "mean_reward", "options": {"lowest": 0.3}}]
    sampler = answers({0: "0000", 1: "1000", 2: "1110", 3: "2222"})
    batch = step(sampler, cursor_over(tmp_path, [1] * 4), filters=filters, samples_per_prompt=4, prompts_per_step=4)
    counts = drop_counts([reason for _, reason in dropped(batch)])
    assert counts == {"dropped_zero_spread": 2.0, "dropped_reward_too_low": 1.0} and kept(batch) == ["p2"]


def test_the_overlong_penalty_is_taken_off_before_filters_look(tmp_path):
    sampler = FakeSampler(lambda request: [[STOP], [5, STOP], [5, 5, STOP]])
    values = {"max_new_tokens": 3, "overlong_buffer": 2, "overlong_penalty": 0.5, "samples_per_prompt": 3}
    values |= {"filters": ["nonzero_spread"], "prompts_per_step": 1}
    batch = step(sampler, cursor_over(tmp_path, [1]), pool=FakePool(lambda answer: 1.0), **values)
    assert [one.reward for one in batch.trained] == [1.0, 0.75, 0.5]
