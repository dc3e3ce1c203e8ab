"""Groups of earlier steps that are trained again (`rollout.replay`)."""

import os
import random
import time
from dataclasses import replace

import pytest

from nanodag.rl.control.replay import ReplayBuffer, replay_metrics
from nanodag.rl.rollouts.batch import RolloutBatch
from nanodag.rl.rollouts.prompts import Prompt
from nanodag.rl.rollouts.rollout import REPLAYED, Rollout, groups_of, prompt_span, read_rollouts, sampled_span
from tests.rl.fakes import config
from tests.rl.stages import end_group, make_job, metrics, run, same_in_the_end, slow_rewards, start, wait_for_step

VALUES = {"prompts_per_step": 4, "replay": {"share": 0.5, "max_staleness": 3}, "correction": "tis", "num_steps": 8}


def batch(step: int, *versions: int) -> RolloutBatch:
    """The fresh groups of a step, of two samples: the last one's tokens are of these versions, the others' current."""
    kept = []
    for number in range(2):
        span = sampled_span([5], [-1.0], step - 1)
        last = replace(span, token_ids=(5,) * len(versions), mask=(1,) * len(versions), versions=versions,
                       logprobs=(-1.0,) * len(versions)) if versions else span  # fmt: skip
        prompt = Prompt(epoch=0, record={"prompt_id": f"{step}-{number}"}, token_ids=(1,))
        group = [
            Rollout(
                group_id=prompt.group_id, prompt_id=prompt.prompt_id, sample_index=index, reward=float(index),
                spans=(prompt_span((1,)), (span, last)[index]), finish_reason="stop",
            )
            for index in range(2)
        ]  # fmt: skip
        kept.append((prompt, group))
    return RolloutBatch(kept=kept)


def replayed(mixed: RolloutBatch) -> list[str]:
    return [prompt.prompt_id for prompt, group in mixed.kept if REPLAYED in group[0].metadata]


def test_a_step_draws_its_share_from_groups_that_are_fresh_enough_by_seed_and_step_alone(tmp_path):
    buffer = ReplayBuffer(config(**VALUES))
    versions, drawn = [0], []
    for step in range(1, 9):
        mixed = buffer.with_replayed(step, batch(step), versions)
        fresh = [prompt.prompt_id.startswith(f"{step}-") for prompt, _ in mixed.kept]
        assert fresh == ([True, False, True, False] if step > 1 else [True, True])
        found = replay_metrics(mixed, versions)
        drawn.append(replayed(mixed))
        assert len(drawn[-1]) == len(set(drawn[-1])) == (2 if step > 1 else 0)
        if step > 1:
            assert found["replayed_groups"] == 2.0 and found["replayed_share"] == 0.5
            assert 1.0 <= found["replayed_staleness"] <= found["replayed_staleness_largest"] <= 3.0
        versions.append(step)
        buffer.keep(step, batch(step), versions)
        if step == 5:
            buffer.save(tmp_path)
            assert (tmp_path / "replay.jsonl").read_text().count("\n") == 6  # of steps 3, 4, 5
    again = ReplayBuffer(config(**VALUES))
    again.load(tmp_path)
    assert replayed(again.with_replayed(6, batch(6), [3, 4, 5])) == drawn[5]
    assert len(set(map(tuple, drawn[3:]))) > 2
    group = again.with_replayed(6, batch(6), [3, 4, 5]).kept[1][1]
    first = int(group[0].prompt_id[0])
    assert group == [
        replace(one, metadata={REPLAYED: first}) for one in groups_of(batch(first).trained)[group[0].group_id]
    ]


def test_a_group_is_as_old_as_its_oldest_trained_token():
    buffer = ReplayBuffer(config(**VALUES))
    buffer.keep(5, batch(5, 4, 2), [1, 2, 3, 4, 5])  # the oldest one was sampled 3 steps before
    assert len(replayed(buffer.with_replayed(6, batch(6), [1, 2, 3, 4, 5]))) == 2
    assert not replayed(buffer.with_replayed(7, batch(7), [1, 2, 3, 4, 5, 6]))
    buffer.keep(6, RolloutBatch(), [1, 2, 3, 4, 5, 6])
    assert not buffer._kept


def make_stage(folder, **values):
    folder.mkdir()
    return make_job(folder, **(VALUES | {"checkpoint_every": 2, "eval_every": 4, "micro_batch_tokens": 128} | values))


def test_a_stage_replays_its_share_corrected_and_each_prompt_is_sampled_once(tmp_path):
    job = make_stage(tmp_path / "stage", num_steps=4, eval_prompts=0)
    run(job)
    steps = metrics(job)
    assert [line.get("replayed_share", 0.0) for line in steps] == [0.0, 0.5, 0.5, 0.5]
    assert all(line["rollouts"] == 8 and line["replayed_ratio"] != 1.0 for line in steps[1:])
    assert steps[3]["staleness_largest"] >= steps[3]["replayed_staleness"] >= 1.0
    ledger = (job.records / "ledger.jsonl").read_text().splitlines()
    assert len(ledger) == 8
    rollouts = list(read_rollouts(job.records / "rollouts" / "step-00000004.jsonl"))
    again = {one.metadata[REPLAYED] for one in rollouts if REPLAYED in one.metadata}
    assert len(rollouts) == 16 and again <= {1, 2, 3} and again


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "values", [{}, {"max_staleness": 1}, {"resources": {"num_ranks": 2, "threads": 1, "device": "cpu"}}]
)
def test_killed_at_random_moments_a_stage_that_replays_ends_on_the_same_bytes(tmp_path, values):
    undisturbed, job = (make_stage(tmp_path / name, **values) for name in ("undisturbed", "killed"))
    run(undisturbed)
    slow_rewards(job.workspace.parent)
    moment = random.Random(os.getpid())
    for step in (moment.randint(1, 3), moment.randint(4, 6)):
        process = start(job)
        wait_for_step(job, process, step)
        time.sleep(moment.random() * 0.2)
        end_group(process)
    run(job)
    same_in_the_end(job, undisturbed)
