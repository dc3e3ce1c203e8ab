"""Samples of several sequences, and of several roles: what is compared, counted and trained."""

from dataclasses import replace

import pytest
import torch

from nanodag.rewards.text_rewards import reported
from nanodag.rl.advantages import grpo
from nanodag.rl.control.generation import with_rewards_of_samples
from nanodag.rl.rollouts.metrics import rollout_metrics
from nanodag.rl.rollouts.rollout import Rollout, from_json, reward_spread, to_json
from nanodag.rl.trainer.credit import advantages_of
from tests.rl import functions
from tests.rl.fakes import FakeSampler, SeenPool
from tests.rl.rollouts import rollout
from tests.rl.turns import batch_of, generator_of, prompts


def one_of(sample: int, reward: float | None, *, branch: int = 0, role: str = "", size: int = 2, **metadata) -> Rollout:
    fields = {"branch": branch, "role": role, "metadata": metadata}
    return rollout("g", sample, [1 + branch], [5] * size, reward=reward, **fields)


def advantages(rollouts, taken=None):
    rewards = torch.tensor([one.reward for one in rollouts])
    return advantages_of(rollouts, rewards, taken, grpo).tolist()


def test_every_sequence_of_a_sample_gets_the_advantage_that_the_sample_has_without_further_ones():
    plain = [one_of(0, 1.0), one_of(1, 0.0), one_of(2, 0.0)]
    branched = [plain[0], plain[1], one_of(1, 0.0, branch=1), one_of(1, 0.0, branch=2), plain[2]]
    alone, together = advantages(plain), advantages(branched)
    assert together == [alone[0], alone[1], alone[1], alone[1], alone[2]]


def test_what_kl_takes_off_a_sample_is_the_sum_over_its_sequences():
    branched = [one_of(0, 1.0), one_of(0, 1.0, branch=1), one_of(1, 1.0)]
    first, second = advantages([one_of(0, 0.25), one_of(1, 1.0)])
    assert advantages(branched, torch.tensor([0.25, 0.5, 0.0])) == pytest.approx([first, first, second])


def test_a_role_is_compared_with_itself():
    solver, judge = [one_of(0, 1.0), one_of(1, 0.0)], [one_of(0, 0.0), one_of(1, 5.0)]
    roles = [("solver", solver[0]), ("judge", judge[0]), ("solver", solver[1]), ("judge", judge[1])]
    both = [replace(one, role=role, branch=int(role == "judge")) for role, one in roles]
    alone = {"solver": advantages(solver), "judge": advantages(judge)}
    assert advantages(both) == [alone[role][one.sample_index] for role, one in roles]


def test_an_advantage_sees_the_trained_tokens_of_all_sequences_of_a_sample():
    seen = []
    branched = [one_of(0, 1.0, size=2), one_of(0, 1.0, branch=1, size=3), one_of(1, 0.0, size=4)]
    advantages_of(branched, torch.tensor([1.0, 1.0, 0.0]), None, lambda *a: seen.append(a) or torch.zeros(2))
    ((rewards, groups, counts),) = seen
    assert (rewards.tolist(), groups.tolist(), counts.tolist()) == ([1.0, 0.0], [0, 0], [5, 4])


def test_metrics_and_spread_count_a_sample_once():
    branched = [one_of(0, 1.0), one_of(0, 1.0, branch=1), one_of(1, 0.0), one_of(2, None)]
    metrics = rollout_metrics(branched)
    assert (metrics["rollouts"], metrics["reward"], metrics["pass_at_1"], metrics["reward_failed"]) == (3, 0.5, 0.5, 1)
    assert metrics["sequences"] == 4 / 3 and "sequences" not in rollout_metrics(branched[:1])
    assert reward_spread([one_of(0, 1.0), one_of(0, 0.0, branch=1, role="judge"), one_of(1, 1.0)]) == 0.0


def test_a_rollout_keeps_branch_and_role_as_json():
    kept = one_of(3, 0.5, branch=2, role="judge")
    assert from_json(to_json(kept)) == kept
    assert '"branch"' not in to_json(one_of(0, 1.0)) and '"role"' not in to_json(one_of(0, 1.0))


def test_a_further_sequence_gets_the_reward_of_its_sample_or_of_its_role():
    judge = one_of(0, 0.25, branch=2, role="judge", reported={"value": 0.25, "components": {}})
    given = [one_of(0, 1.0), one_of(0, None, branch=1), judge, one_of(0, None, branch=3, role="judge")]
    for weight, of_judge in ((1.0, 0.25), (2.0, 0.5), (0.0, 1.0)):
        rewarded = with_rewards_of_samples(given, reported_weight=weight)
        assert [one.reward for one in rewarded] == [1.0, 1.0, of_judge, of_judge]
    failed = [one_of(0, None, reward_error="it raised"), one_of(0, None, branch=1)]
    rewarded = with_rewards_of_samples(failed, reported_weight=1.0)
    assert [one.metadata["reward_error"] for one in rewarded] == ["it raised"] * 2


def test_the_reported_reward_is_what_was_reported():
    said = reported({"reported": {"value": 0.5, "components": {"style": 2.0}}}, "text")
    assert (said.value, said.components) == (0.5, {"style": 2.0})
    with pytest.raises(ValueError, match="reported none"):
        reported({"reported": None}, "text")


def generated(folder, ids, function: str):
    """The rollouts of one prompt, and what the reward saw."""
    pool = SeenPool()
    values = {"generate": f"{functions.__name__}:{function}"}
    generator = generator_of(folder, FakeSampler(lambda request: ids("a<|end|>")), pool, **values)
    ((_, group),) = batch_of(generator, prompts(folder)).kept
    return group, pool.seen


def test_a_branch_begins_with_a_prompt_of_its_own_and_is_trained(folder, ids):
    group, _ = generated(folder, ids, "two_sequences")
    found = [(one.sample_index, one.branch, one.num_trained) for one in group]
    assert found == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert group[1].prompt_token_ids == tuple(ids("another")) and group[1].reward == group[0].reward
    assert group[0].metadata["reported"] == {"value": 1.0, "components": {}}


def test_a_role_may_be_untrained_and_a_reward_never_sees_what_another_role_says(folder, ids):
    group, _ = generated(folder, ids, "an_untrained_role")
    assert [(one.role, one.num_trained) for one in group] == [("", 2), ("judge", 0), ("", 2), ("judge", 0)]
    group, seen = generated(folder, ids, "a_judge")
    assert len(seen) == 2 and [one.reward for one in group] == [1.0, 1.0, 0.0, 0.0]
