"""`generate: verifiers:MODULE`: what becomes of samples, with a fake of verifiers' process and with the package."""

import asyncio
import json
import os
import random
import sys
from contextlib import suppress

import psutil
import pytest

from nanodag.external_envs import verifiers_process
from nanodag.external_envs.verifiers_process import MAX_BYTES, VERIFIERS
from nanodag.host.folders import PROJECT
from nanodag.rl.environments import agents
from nanodag.rl.environments.runner import turns_loop
from nanodag.rl.rollouts.metrics import rollout_metrics
from tests.guest_pythons import verifiers_python
from tests.rl.fakes import FakeSampler
from tests.rl.turns import ids_of, rollouts_of


def generated(encoding, says, tasks, module: str):
    """The rollouts of a group of two for each task; the environment's processes have ended."""
    values = {"generate": {"name": f"verifiers:{module}"}, "sampler": {"context": 200, "max_batch": 64}}
    try:
        return rollouts_of(
            encoding.folder, FakeSampler(says), [{"metadata": {"task": task}} for task in tasks], **values
        )
    finally:
        for at_once in (64, 1):
            process = agents._process(json.dumps({"taskset": {"id": module}}), MAX_BYTES, at_once)
            asyncio.run(turns_loop().do(process.close()))
        agents._process.forget()


def test_a_rollout_is_trained_by_what_its_rubric_says_and_fails_by_itself(encoding, ids, tmp_path, monkeypatch):
    monkeypatch.setenv(VERIFIERS.variable, sys.executable)
    fake = PROJECT / "tests/external_envs/fake_verifiers_server.py"
    for name, value in {"SERVER": fake, "HEALTH_TIMEOUT_S": 0.3, "LOOK_EVERY_S": 0.1}.items():
        monkeypatch.setattr(verifiers_process, name, value)
    dies_once = {"do": "die once", "file": str(tmp_path / "died"), "say": "hi"}
    tasks = [{"do": "answer", "say": "hi"}, {"do": "fail", "say": "hi"}, dies_once, {"do": "die"}, {"do": "block"}]
    rollouts = generated(encoding, lambda request: ids("hello<|end|>"), tasks, "m")
    fine = [one for one in rollouts if one.prompt_id in ("p0", "p2")]
    assert [one.reward for one in fine] == [0.5] * 4 and all("pid" in one.reward_components for one in fine)
    assert all(encoding.decode(one.sampled_token_ids) == "hello<|end|>" for one in fine)
    metrics = rollout_metrics(fine)
    assert metrics["turns"] == 1.0 and metrics["metric_length"] == 5.0
    reasons = {one.prompt_id: one.metadata["generate_error"] for one in rollouts if one.finish_reason == "error"}
    assert reasons.keys() == {"p1", "p3", "p4"} and reasons["p1"] == "TaskError: no"
    assert "ended with code 3" in reasons["p3"] and "a last word" in reasons["p3"]
    assert "ended with code -9" in reasons["p4"]


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


def left(mark):
    """What runs with this in its environment: whatever the environment's process has started, however deep."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if mark in process.environ().values() and process.pid != os.getpid():
                found.append(process.cmdline())
    return found


@pytest.mark.slow
def test_samples_of_broken_environments_fail_alone_and_leave_no_process(encoding, tmp_path, monkeypatch):
    verifiers_python()
    (tmp_path / "hostile_env.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOSTILE_MARK", str(tmp_path))
    draw = random.Random(7)
    ways = [*FINE, *DEADLY, *(draw.choice(CHEAP) for _ in range(400)), *["well"] * 100]
    tasks = [{"prompt": f"hi {number}", "way": way} for number, way in enumerate(ways)]

    def says(request):  # by its seed alone
        return [97 + request.params.sampling_seed % 26, *ids_of(encoding, "ello<|end|>")]

    rollouts = generated(encoding, says, tasks, "hostile_env")
    alone = generated(encoding, says, tasks[:1], "hostile_env")
    for one in rollouts:
        way = ways[int(one.prompt_id.removeprefix("p"))]
        assert one.reward == (0.5 if way in FINE else None), (way, one.metadata)
        assert way in (*FINE, "huge") or one.metadata.get("generate_error"), (way, one.metadata)
    assert [one.spans for one in rollouts if one.prompt_id == "p0"] == [one.spans for one in alone]
    assert left(str(tmp_path)) == []
