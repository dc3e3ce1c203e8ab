"""Environments of the `verifiers` package that break, beside ones that are well: a sample fails by itself alone."""

import asyncio
import os
import random
from contextlib import suppress

import psutil
import pytest

from nanodag.external_envs.verifiers_process import MAX_BYTES
from nanodag.rl.environments import agents
from nanodag.rl.environments.runner import turns_loop
from nanodag.tokenizer.encoding import Encoding
from tests.rl.test_turns import folder  # noqa: F401 - a fixture
from tests.rl.test_verifiers_environment import generated
from tests.verifiers_python import python_or_skip

pytestmark = pytest.mark.slow
HOSTILE = """
import asyncio, math, os, signal, subprocess, sys, time

import verifiers.v1 as vf

REWARDS = {"nan": math.nan, "inf": math.inf, "huge": 1e300, "text": "much", "list": [1.0], "none": None, "well": 0.5}


class Data(vf.TaskData):
    way: str


class Task(vf.Task[Data]):
    async def setup(self, trace, runtime):
        if self.data.way == "raise in setup":
            raise KeyError("none")

    @vf.reward
    async def given(self, trace: vf.Trace) -> float:
        way = self.data.way
        if way == "raise":
            raise RuntimeError("no")
        if way == "exit":
            sys.exit(3)
        if way == "die":
            os._exit(3)
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "leave":
            subprocess.Popen(["sleep", "3601"])
        if way == "fork" and os.fork() == 0:
            time.sleep(3602)
        if way == "wait":
            await asyncio.sleep(3600)
        return REWARDS.get(way, 0.5)

    @vf.metric
    async def count(self, trace: vf.Trace) -> float:
        if self.data.way == "raise in metric":
            raise ValueError("no number")
        return {"nan metric": math.nan, "text metric": "x"}.get(self.data.way, 1.0)


class Hostile(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(prompt="hi", way="well"), self.config.task)]


__all__ = ["Hostile"]
"""
CHEAP = ("nan", "inf", "huge", "text", "list", "none", "raise in setup", "raise", "raise in metric", "nan metric")
DEADLY = ("exit", "die", "kill")  # they take the process with them, and samples beside them begin anew
FINE = ("well", "leave", "fork")  # what is left behind ends with the process
NUM_CHEAP = 400


def left(mark):
    """What runs with this in its environment: whatever the environment's process has started, however deep."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if mark in process.environ().values() and process.pid != os.getpid():
                found.append(process.cmdline())
    return found


def test_samples_of_broken_environments_fail_alone_and_leave_no_process(folder, tmp_path, monkeypatch):  # noqa: F811
    python_or_skip()
    (tmp_path / "hostile_env.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOSTILE_MARK", str(tmp_path))
    draw = random.Random(7)
    broken = [*DEADLY, *(draw.choice(CHEAP) for _ in range(NUM_CHEAP))]
    ways = ["well", "leave", "fork", *broken, *["well"] * 100]
    tasks = [{"prompt": f"hi {number}", "way": way} for number, way in enumerate(ways)]

    def says(request):  # by its seed alone
        return [97 + request.params.sampling_seed % 26, *Encoding(folder).encode("ello<|end|>")]

    try:
        rollouts = generated(folder, says, tasks, name="verifiers:hostile_env")
        alone = generated(folder, says, tasks[:1], name="verifiers:hostile_env")
    finally:
        for at_once in (64, 1):
            process = agents._process('{"taskset": {"id": "hostile_env"}}', MAX_BYTES, at_once)
            asyncio.run(turns_loop().do(process.close()))
        agents._process.forget()
    for one in rollouts:
        way = ways[int(one.prompt_id.removeprefix("p"))]
        if way in FINE:
            assert one.reward == 0.5, (way, one.metadata)
        else:
            assert one.reward is None, (way, one.reward)
            assert one.metadata.get("generate_error") or way == "huge", (way, one.metadata)
    first = [one.spans for one in rollouts if one.prompt_id == "p0"]
    assert first == [one.spans for one in alone]
    assert left(str(tmp_path)) == []
