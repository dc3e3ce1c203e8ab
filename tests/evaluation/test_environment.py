"""Benchmarks of form `verifiers`, with a fake of verifiers' process and a tiny model behind the API."""

import asyncio
import contextlib
import sys

import pytest

from nanodag.children.forks import EpisodeFailed, EpisodeLost
from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.errors import ConfigError, StageFailed
from nanodag.evaluation import verifiers_benchmarks
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.evaluation.verifiers_benchmarks import run_environment
from nanodag.external_envs import verifiers_process
from nanodag.external_envs.verifiers_process import VERIFIERS
from nanodag.store.kept_lines import KeptLines
from tests.evaluation.tiny import asked_by
from tests.external_envs.fake_verifiers_server import FAKE


@pytest.fixture(autouse=True)
def _fake(monkeypatch):
    monkeypatch.setenv(VERIFIERS.variable, sys.executable)
    monkeypatch.setattr(verifiers_process, "SERVER", FAKE)


@pytest.fixture
def model(model_folder):
    return EvaluatedModel(model_folder, asked_by(max_new_tokens=8))


def benchmark(**values):
    return BenchmarkConfig(**{"name": "boxes", "form": "verifiers", "source": "verifiers:m", **values})


def run(model, config):
    return run_environment(model, config, chat=True, seed=0, mirror="")


def test_each_task_is_a_rollout_and_what_was_kept_is_not_run_again(model, tmp_path, monkeypatch):
    with KeptLines(tmp_path / "kept.jsonl") as model.kept:
        result = run(model, benchmark())
    score = result.scores["reward"]
    assert (score.value, score.num_items) == (0.375, 4) and score.low < 0.375 < score.high
    assert [record["prompt"] for record in result.records] == ["the cat", "the dog", "the mat", "fail"]
    assert result.records[3]["details"] == {"error": "TaskError: no"} and result.records[3]["scores"]["reward"] == 0
    first = result.records[0]
    assert first["scores"]["length"] == len(first["output"]) > 0 and first["scores"]["turns"] == 1.0
    monkeypatch.setattr(verifiers_benchmarks, "_served", None)  # nothing is sampled again
    monkeypatch.setattr(verifiers_benchmarks, "MOST_FAILED", 1.0)
    config = benchmark(source="verifiers:m[0:3]")
    with KeptLines(tmp_path / "kept.jsonl") as model.kept:
        assert run(model, config).records == result.records[:3]


def test_too_many_rollouts_that_fail_end_the_benchmark_and_settings_without_meaning_are_refused(model):
    with pytest.raises(StageFailed, match=r"1 of 2 rollouts failed: TaskError: no"):
        run(model, benchmark(source="verifiers:m[2:4]"))
    for settings, said in (
        ({"source": "python:a:b"}, "such as verifiers:my_module"),
        ({"system": "Be brief."}, "system"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(model, benchmark(**settings))


def without_server(monkeypatch):
    monkeypatch.setattr(verifiers_benchmarks, "_served", lambda settings, replicas: contextlib.nullcontext(("", "")))


def play(monkeypatch, rollout):
    """Every environment's process is one that answers with rollout(task). Returns the settings of those made."""
    without_server(monkeypatch)
    made = []

    class Process:
        def __init__(self, block):
            made.append(block)

        async def rollout(self, task, **unused):
            return await rollout(task)

        async def close(self):
            pass

    monkeypatch.setattr(verifiers_benchmarks, "VerifiersProcess", Process)
    return made


def test_an_environment_that_cannot_start_ends_the_benchmark_with_the_reason(model, monkeypatch):
    without_server(monkeypatch)
    with pytest.raises(ConfigError, match=r"(?s)environment 'm' cannot be used.*colour"):
        run(model, benchmark(source="verifiers:m?colour=1"))


def test_options_of_a_benchmark_reach_the_environment_and_are_refused_without_one(model, monkeypatch):
    async def fails(task):
        raise EpisodeFailed("no")

    seen = play(monkeypatch, fails)
    with pytest.raises(StageFailed, match="1 of 1 rollouts failed: no"):
        run(model, benchmark(source="verifiers:m[0:1]", options={"agent.max_turns": 4, "agent.harness.id": "bash"}))
    assert seen == [{"taskset": {"id": "m"}, "agent": {"max_turns": 4, "harness": {"id": "bash"}}}]
    with pytest.raises(ValueError, match=r"options agent.max_turns are those of an environment, and its form is mmlu"):
        benchmark(form="mmlu", options={"agent.max_turns": 4})


def test_a_rollout_whose_process_ended_is_played_again_alone_and_fails_if_it_ends_each_time(model, monkeypatch):
    plays, at_once = [], []

    async def rollout(task):
        plays.append(task["say"])
        at_once.append(task["say"])
        await asyncio.sleep(0)
        others = len(at_once)
        at_once.remove(task["say"])
        if others > 1 or task["say"] == "the mat":
            raise EpisodeLost("it ended")
        counted = {"components": {}, "metrics": {}, "turns": 1, "prompt_tokens": 0, "completion_tokens": 0}
        return {"reward": 1.0, "is_cut": False, "reply": "", **counted}

    play(monkeypatch, rollout)
    monkeypatch.setattr(verifiers_benchmarks, "MOST_FAILED", 0.5)
    result = run(model, benchmark(source="verifiers:m[0:3]"))
    assert [record["scores"]["reward"] for record in result.records] == [1.0, 1.0, 0.0]
    assert plays.count("the mat") == 3 and result.records[2]["details"] == {"error": "it ended"}
