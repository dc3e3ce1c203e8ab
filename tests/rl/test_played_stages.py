"""Whole RL stages whose samples take several turns, act in an environment, and become several sequences."""

from collections import Counter

from nanodag.rl.rollouts.rollout import groups_of
from tests.rl.programs import played_job, trained
from tests.rl.stages import left_of, metrics, run


def test_tool_tokens_are_in_every_rollout_and_trainer_and_sampler_agree_on_the_others(tmp_path):
    job = played_job(tmp_path, "turns")
    run(job)
    steps = {step: trained(job, step) for step in range(1, 5)}
    rollouts = [rollout for of_step in steps.values() for rollout in of_step]
    for rollout in rollouts:
        kinds = [span.kind for span in rollout.spans]
        assert kinds[:3] == ["prompt", "sampled", "tool"] and kinds[3:] in ([], ["sampled"])
        assert rollout.num_sampled <= 8
    assert {len(group) for group in groups_of(rollouts).values()} <= {2, 4, 6}
    for line in metrics(job):
        assert line["mismatch_largest"] < 1e-4 and line["staleness_largest"] == 0 and line["tool_results"] > 0
        assert line["trained_tokens"] == sum(rollout.num_sampled for rollout in steps[line["step"]])
    assert {version for rollout in steps[4] for version in rollout.versions} == {3}


def test_a_stage_trains_both_roles_and_logs_what_the_environment_says(tmp_path):
    job = played_job(tmp_path, "world", num_steps=2)
    run(job)
    rollouts = trained(job, 2)
    assert {rollout.role for rollout in rollouts} == {"writer", "critic"}
    samples = {(rollout.group_id, rollout.sample_index) for rollout in rollouts}
    assert Counter(rollout.branch == 0 for rollout in rollouts)[True] == len(samples)
    for line in metrics(job):
        assert line["mismatch_largest"] < 1e-4 and line["metric_rounds"] == 2 and line["turns"] == 4
        assert line["trained_tokens"] == sum(rollout.num_trained for rollout in trained(job, line["step"]))
    assert left_of(tmp_path, "children.fork_server") == []
