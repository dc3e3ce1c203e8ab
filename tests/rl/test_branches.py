"""Samples of several sequences, and of several roles: what is compared, counted and trained."""

from dataclasses import replace

import pytest
import torch

from nanodag.rewards.text_rewards import reported
from nanodag.rl.advantages.grpo import grpo
from nanodag.rl.control.generation import with_rewards_of_samples
from nanodag.rl.rollouts.metrics import rollout_metrics
from nanodag.rl.rollouts.rollout import Rollout, from_json, prompt_span, reward_spread, sampled_span, to_json
from nanodag.rl.trainer.credit import advantages_of
from tests.rl.test_turns import Script, SeenPool, batch_of, config, folder, ids, made, prompts  # noqa: F401 - fixtures


def rollout(
    sample: int, reward: float | None, *, branch: int = 0, role: str = "", size: int = 2, **metadata
) -> Rollout:
    return Rollout(
        group_id="g",
        prompt_id="p",
        sample_index=sample,
        spans=(prompt_span([1 + branch]), sampled_span([5] * size, [-0.5] * size, 3)),
        finish_reason="stop",
        reward=reward,
        branch=branch,
        role=role,
        metadata=metadata,
    )


def advantages(rollouts, taken=None):
    rewards = torch.tensor([one.reward for one in rollouts])
    return advantages_of(rollouts, rewards, taken, grpo).tolist()


def test_every_sequence_of_a_sample_gets_the_advantage_that_the_sample_has_without_further_ones():
    plain = [rollout(0, 1.0), rollout(1, 0.0), rollout(2, 0.0)]
    branched = [plain[0], plain[1], rollout(1, 0.0, branch=1), rollout(1, 0.0, branch=2), plain[2]]
    alone, together = advantages(plain), advantages(branched)
    assert together == [alone[0], alone[1], alone[1], alone[1], alone[2]]


def test_what_kl_takes_off_a_sample_is_the_sum_over_its_sequences():
    branched = [rollout(0, 1.0), rollout(0, 1.0, branch=1), rollout(1, 1.0)]
    assert advantages(branched, torch.tensor([0.25, 0.5, 0.0])) == pytest.approx(
        [advantages([rollout(0, 0.25), rollout(1, 1.0)])[n] for n in (0, 0, 1)]
    )


def test_a_role_is_compared_with_itself():
    both = [
        one
        for sample, (solved, judged) in enumerate([(1.0, 0.0), (0.0, 5.0)])
        for one in (rollout(sample, solved, role="solver"), rollout(sample, judged, branch=1, role="judge"))
    ]
    solver = advantages([rollout(0, 1.0), rollout(1, 0.0)])
    judge = advantages([rollout(0, 0.0), rollout(1, 5.0)])
    assert advantages(both) == [solver[0], judge[0], solver[1], judge[1]]


def test_an_advantage_sees_the_trained_tokens_of_all_sequences_of_a_sample():
    seen = []
    branched = [rollout(0, 1.0, size=2), rollout(0, 1.0, branch=1, size=3), rollout(1, 0.0, size=4)]
    advantages_of(branched, torch.tensor([1.0, 1.0, 0.0]), None, lambda *a: seen.append(a) or torch.zeros(2))
    ((rewards, groups, counts),) = seen
    assert (rewards.tolist(), groups.tolist(), counts.tolist()) == ([1.0, 0.0], [0, 0], [5, 4])


def test_metrics_and_spread_count_a_sample_once():
    branched = [rollout(0, 1.0), rollout(0, 1.0, branch=1), rollout(1, 0.0), rollout(2, None)]
    metrics = rollout_metrics(branched)
    assert (metrics["rollouts"], metrics["reward"], metrics["pass_at_1"], metrics["reward_failed"]) == (3, 0.5, 0.5, 1)
    assert metrics["sequences"] == 4 / 3 and "sequences" not in rollout_metrics(branched[:1])
    assert reward_spread([rollout(0, 1.0), rollout(0, 0.0, branch=1, role="judge"), rollout(1, 1.0)]) == 0.0


def test_a_rollout_keeps_branch_and_role_as_json():
    kept = rollout(3, 0.5, branch=2, role="judge")
    assert from_json(to_json(kept)) == kept
    assert '"branch"' not in to_json(rollout(0, 1.0)) and '"role"' not in to_json(rollout(0, 1.0))


def test_a_further_sequence_gets_the_reward_of_its_sample_or_of_its_role():
    judge = rollout(0, 0.25, branch=2, role="judge", reported={"value": 0.25, "components": {}})
    given = [rollout(0, 1.0), rollout(0, None, branch=1), judge, rollout(0, None, branch=3, role="judge")]
    assert [one.reward for one in with_rewards_of_samples(given, reported_weight=1.0)] == [1.0, 1.0, 0.25, 0.25]
    assert [one.reward for one in with_rewards_of_samples(given, reported_weight=2.0)] == [1.0, 1.0, 0.5, 0.5]
    assert [one.reward for one in with_rewards_of_samples(given, reported_weight=0.0)] == [1.0] * 4
    failed = [rollout(0, None, reward_error="it raised"), rollout(0, None, branch=1)]
    assert [one.metadata["reward_error"] for one in with_rewards_of_samples(failed, reported_weight=1.0)] == [
        "it raised"
    ] * 2


def test_the_reported_reward_is_what_was_reported():
    said = reported({"reported": {"value": 0.5, "components": {"style": 2.0}}}, "text")
    assert (said.value, said.components) == (0.5, {"style": 2.0})
    with pytest.raises(ValueError, match="reported none"):
        reported({"reported": None}, "text")


def test_reported_is_refused_where_nobody_reports():
    with pytest.raises(Exception, match="generate one_turn says none"):
        config(reward="reported")


async def two_sequences(sampler, sample):
    main = await sampler.turn(sample)
    side = await sampler.turn(sample.beginning(sampler.encode("another")))
    return replace(main, reward=1.0, branches=(side,))


async def an_untrained_role(sampler, sample):
    judge = replace(await sampler.turn(sample.beginning(sampler.encode("judge"))), role="judge", is_trained=False)
    return replace(await sampler.turn(sample), branches=(judge,))


def generated(folder, ids, function):  # noqa: F811
    generator = made(folder, Script(lambda request: ids("a<|end|>")), generate=f"{__name__}:{function}")
    ((_, group),) = batch_of(generator, prompts(ids)).kept
    return group


def test_a_branch_begins_with_a_prompt_of_its_own_and_is_trained(folder, ids):  # noqa: F811
    group = generated(folder, ids, "two_sequences")
    assert [(one.sample_index, one.branch, one.num_trained) for one in group] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert group[1].prompt_token_ids == tuple(ids("another")) and group[1].reward == group[0].reward
    assert group[0].metadata["reported"] == {"value": 1.0, "components": {}}


def test_the_sequence_of_a_role_that_is_not_trained_has_no_trained_token(folder, ids):  # noqa: F811
    group = generated(folder, ids, "an_untrained_role")
    assert [(one.role, one.num_trained) for one in group] == [("", 2), ("judge", 0), ("", 2), ("judge", 0)]


async def a_judge(sampler, sample):
    judge = replace(await sampler.turn(sample.beginning(sampler.encode("judge"))), role="judge", reward=0.25)
    return replace(await sampler.turn(sample), branches=(judge,))


def test_a_reward_never_sees_what_another_role_says(folder, ids):  # noqa: F811
    pool = SeenPool()
    generator = made(folder, Script(lambda request: ids("a<|end|>")), pool, generate=f"{__name__}:a_judge")
    ((_, group),) = batch_of(generator, prompts(ids)).kept
    assert len(pool.seen) == 2 and [one.reward for one in group] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (lambda one: replace(one, branches=(replace(one, branches=(one,)),)), "a branch has branches"),
        (lambda one: replace(one, is_trained=False), "must say its role"),
        (lambda one: replace(one, role="judge", is_trained=False), "no role of a sample is trained"),
        (lambda one: replace(one, reward=float("nan")), "Out of range float"),
        (lambda one: replace(one, branches=(one.beginning([1]),)), "no turn added to"),
    ],
)
def test_sequences_that_cannot_be_trained_fail_their_sample_with_the_reason(folder, ids, spoilt, reason):  # noqa: F811
    async def function(sampler, sample):
        return spoilt(await sampler.turn(sample))

    generator = made(folder, Script(lambda request: ids("a<|end|>")), generate=f"{__name__}:two_sequences")
    generator._turns._function = function
    with pytest.raises(Exception, match=reason):
        batch_of(generator, prompts(ids))
