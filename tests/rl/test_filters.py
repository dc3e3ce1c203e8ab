"""Which groups are trained on, and what is taken off their rewards first."""

import pytest

from nanodag import registry as entries
from nanodag.config.kinds.rl import RLStage
from nanodag.errors import ConfigError
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.rollouts.batch import RolloutBatch
from nanodag.rl.rollouts.metrics import drop_counts
from nanodag.rl.rollouts.prompts import Prompt
from tests.rl.models import rollout

PROMPT = Prompt(epoch=0, record={"prompt_id": "a"}, token_ids=(1,))


def group(*rewards: float, responses=((2,), (2, 3), (2, 3, 4))):
    return [
        rollout("a", i, [1], list(responses[i % len(responses)]), reward=reward) for i, reward in enumerate(rewards)
    ]


def judged(filters, *groups, **config) -> RolloutBatch:
    stage = RLStage.of(kind="rl", data=["file:x"], filters=filters, **config)
    generator = RolloutGenerator(stage, None, None, None, ())
    batch = RolloutBatch()
    for one in groups:
        generator._judge(PROMPT, one, batch)
    return batch


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


def test_every_drop_is_counted_by_the_first_filter_that_says_so():
    filters = ["nonzero_spread", {"name": "mean_reward", "options": {"lowest": 0.3}}]
    batch = judged(filters, group(0, 0, 0), group(1, 0, 0, 0), group(1, 1, 0), group(2, 2))
    assert drop_counts([drop.reason for drop in batch.dropped]) == {
        "dropped_zero_spread": 2.0,
        "dropped_reward_too_low": 1.0,
    }
    assert len(batch.kept) == 1


def test_the_overlong_penalty_is_taken_off_before_filters_look():
    batch = judged(["nonzero_spread"], group(1, 1, 1), max_new_tokens=3, overlong_buffer=2, overlong_penalty=0.5)
    assert [one.reward for one in batch.trained] == [1.0, 0.75, 0.5]


def own(group, *, largest):
    """A user's filter."""
    return "too_many" if len(group) > largest else None


def test_a_users_own_filter_gets_its_options():
    assert entries.load("filter", f"{__name__}:own", {"largest": 2})(group(1, 0, 1)) == "too_many"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no_such_filter", "no filter 'no_such_filter'"),
        ({"name": "length", "options": {"longest": 3}}, "has no option 'longest'; it takes highest, lowest, truncated"),
        ("diversity", "needs the option 'lowest'"),
        ("length", "needs an option"),
        ({"name": "nonzero_spread", "options": {"lowest": 1}}, "takes no options"),
    ],
)
def test_a_filter_that_does_not_exist_or_would_do_nothing_is_refused(given, message):
    with pytest.raises((ValueError, ConfigError), match=message):
        RLStage.of(kind="rl", data=["file:x"], filters=[given])
