"""A whole RL stage whose samples come from an environment of the `verifiers` package, undisturbed and killed."""

import os
import random
import subprocess
import time
from collections import Counter
from contextlib import suppress

import pytest

from nanodag.rl.rollouts.prompts import read_ledger
from nanodag.rl.rollouts.rollout import read_rollouts
from tests.rl.stages import end_group, left_of, make_job, run, same_in_the_end, start, wait_for_step
from tests.rl.test_environments_stage import end_one
from tests.verifiers_python import python_or_skip

pytestmark = pytest.mark.slow

GAME = '''
"""A user who answers each text by what it counts in it, and a helper's opinion beside: no word of it by chance."""

import asyncio
import random

import verifiers.v1 as vf


class GameData(vf.TaskData):
    start: int


class GameTask(vf.Task[GameData]):
    @vf.reward(weight=0.5)
    async def letters(self, trace: vf.Trace) -> float:
        said = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(c.isascii() and c.isalpha() for c in said) / max(1, len(said))

    @vf.metric
    async def said(self, trace: vf.Trace) -> float:
        return float(sum(len(message.content or "") for message in trace.assistant_messages))


class GameConfig(vf.TasksetConfig):
    size: int = 11


class GameEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GameEnv(vf.Env[GameEnvConfig]):
    async def run(self, task, agents):
        draw = random.Random(task.data.start)
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and interaction.trace.num_turns < 3:
                await asyncio.sleep(0.002)
                letters = sum(c.isascii() and c.isalpha() for c in segment.last_reply)
                segment = await interaction.turn(f"{letters} {draw.randint(0, 9)}?")
        interaction.trace.record_reward("turns", interaction.trace.num_turns / 3, 0.25)


class GameTaskset(vf.Taskset[GameTask, GameConfig]):
    def load(self):
        for number in range(self.config.size):
            yield GameTask(GameData(prompt=f"word {number}", start=number), self.config.task)


__all__ = ["GameTaskset", "GameEnv"]
'''
GENERATE = {"name": "verifiers:tiny_game", "options": {"player.sampling.max_tokens": 4, "at_once": 8}}
VALUES = {"generate": GENERATE, "reward": "auto", "num_steps": 4, "checkpoint_every": 2, "eval_every": 4}
LENGTHS = {"max_new_tokens": 12, "sampler": {"context": 96, "max_batch": 16}, "micro_batch_tokens": 128}
SURVIVED = ("verifiers_server.py", "sampler")  # what stands in the command lines of those whom the stage survives


def make_stage(folder, **values):
    data = [{"url": "verifiers:tiny_game?size=11", "held_out": 0.3}]
    folder.mkdir()
    job = make_job(folder, **(VALUES | LENGTHS | {"data": data} | values))
    (folder / "tiny_game.py").write_text(GAME)
    return job


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ahead", [0, 1])
def test_whoever_is_killed_at_random_moments_it_ends_on_the_same_bytes(tmp_path, ahead):
    python_or_skip()
    values = {"max_staleness": ahead, "correction": "tis", "over_sampling": 3, "num_steps": 12, "checkpoint_every": 3}
    undisturbed, job = (make_stage(tmp_path / name, **values) for name in ("undisturbed", "killed"))
    run(undisturbed, fresh=True)
    moment, num_killed = random.Random(os.getpid()), Counter()
    for number, last in enumerate(("", "rl.trainer.trainer", "")):  # the stage itself, and whom it does not survive
        process = start(job, fresh=True)
        for place, victim in enumerate((*SURVIVED, last)):
            wait_for_step(job, process, 3 * number + place + (place > 0 or number > 0))
            time.sleep(moment.random() * 0.3)
            num_killed[victim] += end_one(process.pid, victim)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        end_group(process)
    run(job)
    same_in_the_end(job, undisturbed)
    assert num_killed == {"verifiers_server.py": 3, "sampler": 3, "": 2, "rl.trainer.trainer": 1}
    reasons = Counter(one.finish_reason for step in range(1, 13) for one in trained(job, step))
    assert reasons["error"] == 0, "a sample whose process is lost is played again"
    lines = read_ledger(job.records / "ledger.jsonl")
    assert max(Counter((line["epoch"], line["prompt_id"]) for line in lines).values()) == 1
    assert left_of(tmp_path, SURVIVED[0]) == []


def trained(job, step: int):
    return list(read_rollouts(job.records / "rollouts" / f"step-{step:08d}.jsonl"))
