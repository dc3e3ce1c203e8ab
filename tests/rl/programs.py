"""Stages whose samples are played by code of a user's own: each program, and the settings of a stage that has it."""

from pathlib import Path
from typing import Any

from nanodag.rl.rollouts.rollout import Rollout, read_rollouts
from nanodag.worker.job import Job
from tests.rl.stages import make_job

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

# Few answers begin with a letter: many groups have no spread, and are dropped.
SPARSE = "def vowels(prompt, completion):\n    return float(completion[:1].isascii() and completion[:1].isalpha())\n"

SHORT = {"num_steps": 4, "checkpoint_every": 2, "eval_every": 4}
LENGTHS = {"max_new_tokens": 12, "sampler": {"context": 96, "max_batch": 16}, "micro_batch_tokens": 128}
FILES = {"agent": AGENT, "turns": TURNS, "world": WORLD, "game": GAME}
VALUES: dict[str, dict[str, Any]] = {
    "agent": {
        "generate": {"name": "agent:tiny_agent:solve", "options": {"seconds": 60.0, "at_once": 3}},
        **{"reward": "reported", "samples_per_prompt": 3, "max_failed_rewards": 0.9},
    },
    "turns": {"generate": {"name": "tiny_turns:talk", "options": {"said": "ok "}}, "samples_per_prompt": 3},
    "world": {
        "generate": {"name": "environment:tiny_world:World", "options": {"rounds": 2, "turn_tokens": 5}},
        **{"reward": "reported", **LENGTHS},
    },
    "game": {
        "generate": {"name": "verifiers:tiny_game", "options": {"player.sampling.max_tokens": 4, "at_once": 8}},
        **{"reward": "auto", "data": [{"url": "verifiers:tiny_game?size=11", "held_out": 0.3}], **LENGTHS},
    },
}


def played_job(folder: Path, player: str, **values: Any) -> Job:
    """A stage of 4 steps whose samples this program plays."""
    job = make_job(folder, **{**SHORT, **VALUES[player], **values})
    (folder / f"tiny_{player}.py").write_text(FILES[player])
    return job


def trained(job: Job, step: int) -> list[Rollout]:
    return list(read_rollouts(job.records / "rollouts" / f"step-{step:08d}.jsonl"))
