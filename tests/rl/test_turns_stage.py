"""A whole RL stage whose responses have several turns and become several samples, undisturbed and killed."""

import os
import random
import time
from collections import Counter

import pytest

from nanodag.rl.rollouts.prompts import read_ledger
from nanodag.rl.rollouts.rollout import groups_of, read_rollouts
from tests.rl.stages import make_job, metrics, run
from tests.rl.test_stage import end_group, same_in_the_end, start, wait_for_step

TURNS = '''
import asyncio

async def talk(sampler, sample, *, said):
    """A turn of 3 tokens, a tool that says something, then two samples that end in their own way; every ninth call
    fails."""
    if sample.seed % 9 == 0:
        raise RuntimeError("no luck")
    sample = await sampler.turn(sample, max_tokens=3)
    sample = sample.with_tool(sampler.encode(said + sampler.decode(sample.last_turn)[:2]))
    await asyncio.sleep(sample.seed % 7 / 200)
    return list(await asyncio.gather(*(sampler.turn(one) for one in sample.forked(2))))
'''
VALUES = {"generate": {"name": "tiny_turns:talk", "options": {"said": "ok "}}, "num_steps": 4, "checkpoint_every": 2}


def make_stage(folder, **values):
    job = make_job(folder, **(VALUES | {"eval_every": 4, "samples_per_prompt": 3} | values))
    (folder / "tiny_turns.py").write_text(TURNS)
    return job


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    job = make_stage(tmp_path_factory.mktemp("turns"))
    run(job)
    return job


def test_tool_tokens_are_in_every_rollout_and_trainer_and_sampler_agree_on_the_others(finished):
    rollouts = [one for step in range(1, 5) for one in trained(finished, step)]
    for rollout in rollouts:
        assert [span.kind for span in rollout.spans] in (
            ["prompt", "sampled", "tool", "sampled"],
            ["prompt", "sampled", "tool"],
        )
        assert rollout.num_sampled <= 8
    assert {len(group) for group in groups_of(rollouts).values()} <= {2, 4, 6}
    sampled = Counter()
    for line in metrics(finished):
        assert line["mismatch_largest"] < 1e-4 and line["staleness_largest"] == 0 and line["tool_results"] > 0
        sampled[line["step"]] = line["trained_tokens"]
    assert sampled == Counter({step: sum(one.num_sampled for one in trained(finished, step)) for step in range(1, 5)})
    assert {version for one in trained(finished, 4) for version in one.versions} == {3}


def trained(job, step: int):
    return list(read_rollouts(job.records / "rollouts" / f"step-{step:08d}.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_killed_at_random_moments_it_ends_on_the_same_bytes_and_each_prompt_is_in_the_ledger_once(tmp_path, ahead):
    values = {"max_staleness": ahead, "correction": "tis", "over_sampling": 3}
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    undisturbed, job = (make_stage(tmp_path / name, **values) for name in ("undisturbed", "killed"))
    run(undisturbed)
    moment = random.Random(os.getpid())
    for step in (moment.randint(0, 1), moment.randint(2, 3)):
        process = start(job)
        if step:
            wait_for_step(job, process, step)
        time.sleep(moment.random() * (0.3 if step else 5.0))
        end_group(process)
    run(job)
    same_in_the_end(job, undisturbed)
    lines = read_ledger(job.records / "ledger.jsonl")
    assert max(Counter((line["epoch"], line["prompt_id"]) for line in lines).values()) == 1
