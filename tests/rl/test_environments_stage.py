"""A whole RL stage whose samples act in an environment with two roles, undisturbed and killed."""

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress

import psutil
import pytest

from nanodag.rl.rollouts.prompts import read_ledger
from nanodag.rl.rollouts.rollout import read_rollouts
from tests.rl.stages import end_group, left_of, make_job, metrics, run, same_in_the_end, start, wait_for_step

WORLD = '''
import random
import time


class World:
    """A writer is told what a critic, who is asked anew each time, has said of its text."""

    roles = {"writer": True, "critic": True}

    def __init__(self, *, rounds):
        self.rounds = rounds

    def reset(self, *, seed, record):
        self.seed, self.round = seed, 0
        return {"to": "writer", "messages": None}

    def step(self, action):
        time.sleep(0.002)
        letters = sum(c.isascii() and c.isalpha() for c in action.text)
        if action.role == "writer":
            return {"to": "critic", "messages": f"{letters} {self.seed % 7}?", "anew": True}, letters / 8, False, {}
        self.round += 1
        said = f"{action.text[:2]}{random.randint(0, 9)}"
        return {"to": "writer", "messages": said}, {"critic": letters % 3 / 2}, self.round == self.rounds, {}

    def metrics(self):
        return {"rounds": self.round}
'''
GENERATE = {"name": "environment:tiny_world:World", "options": {"rounds": 2, "turn_tokens": 5}}
VALUES = {"generate": GENERATE, "reward": "reported", "num_steps": 4, "checkpoint_every": 2, "eval_every": 4}
LENGTHS = {"max_new_tokens": 12, "sampler": {"context": 96, "max_batch": 16}, "micro_batch_tokens": 128}
VICTIMS = ("children.fork_server", "sampler", "rl.trainer.trainer")  # what stands in their command lines


def make_stage(folder, **values):
    job = make_job(folder, **(VALUES | LENGTHS | values))
    (folder / "tiny_world.py").write_text(WORLD)
    return job


def trained(job, step: int):
    return list(read_rollouts(job.records / "rollouts" / f"step-{step:08d}.jsonl"))


def test_a_stage_trains_both_roles_and_logs_what_the_environment_says(tmp_path):
    job = make_stage(tmp_path, num_steps=2)
    run(job)
    rollouts = trained(job, 2)
    assert {one.role for one in rollouts} == {"writer", "critic"}
    assert Counter(one.branch == 0 for one in rollouts)[True] == len({(r.group_id, r.sample_index) for r in rollouts})
    for line in metrics(job):
        assert line["mismatch_largest"] < 1e-4 and line["metric_rounds"] == 2 and line["turns"] == 4
        assert line["trained_tokens"] == sum(one.num_trained for one in trained(job, line["step"]))
    assert left_of(tmp_path, VICTIMS[0]) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whoever_is_killed_at_random_moments_it_ends_on_the_same_bytes(tmp_path, num_ranks):
    values = {"max_staleness": num_ranks - 1, "correction": "tis", "over_sampling": 3, "num_steps": 12}
    values |= {"checkpoint_every": 3, "resources": {"num_ranks": num_ranks, "threads": 1, "device": "cpu"}}
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    undisturbed, job = (make_stage(tmp_path / name, **values) for name in ("undisturbed", "killed"))
    run(undisturbed)
    moment, num_killed = random.Random(os.getpid()), Counter()
    for number, victim in enumerate(("", *VICTIMS, "episode", "episode")):
        process = start(job, fresh=True)
        wait_for_step(job, process, moment.randint(2 * number, 2 * number + 1))
        time.sleep(moment.random() * 0.1)
        num_killed[victim] += end_one(process.pid, victim)
        if victim in VICTIMS[:2] or victim == "episode":  # the stage goes on by itself
            time.sleep(moment.random() * 0.5)
        else:
            with suppress(Exception):
                process.wait(timeout=60)
        end_group(process)
    assert all(num_killed[victim] for victim in VICTIMS), num_killed
    run(job)
    same_in_the_end(job, undisturbed)
    assert left_of(tmp_path, VICTIMS[0]) == []
    lines = read_ledger(job.records / "ledger.jsonl")
    assert max(Counter((line["epoch"], line["prompt_id"]) for line in lines).values()) == 1


def end_one(pid: int, victim: str) -> int:
    """Kill a process of a stage: the one with these words in its command line, an episode, or for none the stage's own;
    returns how many were killed."""
    found = []
    with suppress(psutil.Error):
        found = [psutil.Process(pid)]
        if victim == "episode":
            found = [child for server in _with(pid, VICTIMS[0]) for child in server.children()]
        elif victim:
            found = _with(pid, victim)
    for one in found[:1]:
        with suppress(psutil.Error):
            one.send_signal(signal.SIGKILL)
    return len(found[:1])


def _with(pid: int, words: str) -> list[psutil.Process]:
    """The outermost processes with these words in their command lines: an episode has its server's."""
    below = psutil.Process(pid).children(recursive=True)
    found = [one for one in below if words in " ".join(one.cmdline()) and "--multiprocessing" not in one.cmdline()]
    return [one for one in found if one.ppid() not in {other.pid for other in found}]
