"""A whole RL stage whose samples come from an agent with parallel calls, undisturbed and killed."""

import os
import random
import time

import pytest

from nanodag.rl.rollouts.rollout import read_rollouts
from tests.rl.stages import end_group, make_job, metrics, run, same_in_the_end, start, wait_for_step

AGENT = '''
import concurrent.futures, json, random, time, urllib.request

def said(task, text, **more):
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}).encode()
    headers = {"Authorization": "Bearer " + task.api_key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(task.base_url + "/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

def solve(task):
    """Two helpers at once, one of them asked twice, then a word of its own; every ninth sample fails."""
    if task.seed % 9 == 0:
        raise RuntimeError("no luck")
    time.sleep(task.seed % 7 / 200)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        words = list(pool.map(lambda text: said(task, text), ["a", "b" * random.randint(1, 3), "a"]))
    text = said(task, "c" * (1 + len(words[1]) % 3)) + words[1]
    return sum(one.isascii() and one.isalpha() for one in text) / max(1, len(text)), {"words": len(words)}
'''


def make_stage(folder, **values):
    generate = {"name": "agent:tiny_agent:solve", "options": {"seconds": 60.0, "at_once": 3}}
    base = {"generate": generate, "reward": "reported", "num_steps": 4, "checkpoint_every": 2, "eval_every": 4}
    job = make_job(folder, **(base | {"samples_per_prompt": 3} | values))
    (folder / "tiny_agent.py").write_text(AGENT)
    return job


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_killed_at_random_moments_a_stage_with_an_agent_ends_on_the_same_bytes(tmp_path, ahead):
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
    rollouts = [one for step in range(1, 5) for one in trained(job, step)]
    assert {one.branch for one in rollouts} == {0, 1, 2, 3} and {one.role for one in rollouts} == {"agent"}
    for line in metrics(job):
        assert (ahead or line["mismatch_largest"] < 1e-4) and 3.0 < line[
            "sequences"
        ] <= 4.0  # a sample that failed has one


def trained(job, step: int):
    return list(read_rollouts(job.records / "rollouts" / f"step-{step:08d}.jsonl"))
