"""`generate: verifiers:MODULE` with a fake of verifiers' process and of the sampler: what becomes of a sample."""

import asyncio
import sys
from dataclasses import replace

import pytest

from nanodag.external_envs import verifiers_process
from nanodag.external_envs.verifiers_install import VERIFIERS
from nanodag.external_envs.verifiers_process import MAX_BYTES
from nanodag.rewards.reward_pool import RewardPool
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.environments import verifiers_environment
from nanodag.rl.environments.runner import Turns, turns_loop
from nanodag.rl.rollouts.metrics import rollout_metrics
from nanodag.tokenizer.chat import load_renderer
from nanodag.tokenizer.encoding import Encoding
from tests.external_envs.fake_verifiers_server import FAKE
from tests.rl.stages import VOCABULARY
from tests.rl.test_turns import Cursor, Script, config, folder, ids, prompts  # noqa: F401 - two are fixtures


@pytest.fixture
def _fake(monkeypatch):
    monkeypatch.setenv(VERIFIERS.variable, sys.executable)
    monkeypatch.setattr(verifiers_process, "SERVER", FAKE)
    monkeypatch.setattr(verifiers_process, "HEALTH_TIMEOUT_S", 0.3)
    monkeypatch.setattr(verifiers_process, "LOOK_EVERY_S", 0.1)
    yield
    for at_once in (64, 1):
        process, _ = verifiers_environment._process('{"taskset": {"id": "m"}}', MAX_BYTES, at_once)
        asyncio.run(turns_loop().do(process.close()))
    verifiers_environment._process.forget()


def generated(folder, says, tasks, **values):  # noqa: F811
    """The rollouts of one step, a group of two for each task."""
    script, encoding, renderer, pool = Script(says), Encoding(folder), load_renderer(folder), RewardPool("reported")
    named = {"name": "verifiers:m", **values}
    stage = config(generate=named, filters=[], prompts_per_step=len(tasks), max_failed_rewards=0.9)
    turns = Turns(stage, encoding, renderer, context=200, vocabulary=VOCABULARY)
    generator = RolloutGenerator(stage, script, pool, encoding, renderer.stop_ids, turns)
    asked = prompts(lambda text: [266 - 10, *text[-2:].encode()], len(tasks))
    given = [
        replace(prompt, record={**prompt.record, "metadata": {"task": task}, "reward": "reported"})
        for prompt, task in zip(asked, tasks, strict=True)
    ]

    async def step():
        return await generator.step(Cursor(given), 1)

    try:
        return asyncio.run(step()).all_rollouts
    finally:
        pool.close()


@pytest.mark.usefixtures("_fake")
def test_a_rollout_is_trained_by_what_its_rubric_says_and_fails_by_itself(folder, ids, tmp_path):  # noqa: F811
    tasks = [
        {"do": "answer", "say": "hi"},
        {"do": "fail", "say": "hi"},
        {"do": "die once", "file": str(tmp_path / "died"), "say": "hi"},
        {"do": "die"},
        {"do": "block"},
    ]
    rollouts = generated(folder, lambda request: ids("hello<|end|>"), tasks)
    fine = [one for one in rollouts if one.prompt_id in ("p0", "p2")]
    assert [one.reward for one in fine] == [0.5] * 4 and all("pid" in one.reward_components for one in fine)
    assert all(Encoding(folder).decode(one.sampled_token_ids) == "hello<|end|>" for one in fine)
    metrics = rollout_metrics(fine)
    assert metrics["turns"] == 1.0 and metrics["metric_length"] == 5.0
    reasons = {one.prompt_id: one.metadata["generate_error"] for one in rollouts if one.finish_reason == "error"}
    assert reasons.keys() == {"p1", "p3", "p4"} and reasons["p1"] == "TaskError: no"
    assert "ended with code 3" in reasons["p3"] and "a last word" in reasons["p3"]
    assert "ended with code -9" in reasons["p4"]
