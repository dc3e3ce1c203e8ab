"""The benchmarks that a policy is asked while it trains: the questions, seeds and scores of an eval stage."""

import asyncio
import json
from dataclasses import replace

import pytest

from nanodag.errors import SamplerError
from nanodag.evaluation.benchmark import open_benchmark
from nanodag.inference.protocol import FinishReason
from nanodag.rl.control.evaluations import PolicyBenchmark
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.tokenizer.chat import load_renderer
from tests.rl.fakes import FakeSampler, completion, config
from tests.rl.turns import ids_of


@pytest.fixture
def opened(tmp_path, folder, encoding):
    """opened(answer, values of a benchmark): the benchmarks, the sampler, the config and the renderer. answer(): the
    next answer's text, with special tokens by name, and how it ended."""
    rows = [{"question": f"{n} + 0?", "answer": f"#### {n}"} for n in range(3)]
    rows += [{"question": "9" * 90, "answer": "#### 9"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def made(answer, **values):
        sets = [{"name": "gsm8k", "source": f"file:{tmp_path}/rows.jsonl", **values}]
        stage = config(benchmarks=sets, max_new_tokens=16)
        renderer = load_renderer(folder)

        def says(request):
            text, ending = answer()
            whole = completion([*ids_of(encoding, text), *[renderer.stop_ids[0]] * (ending == "stop")], ending)
            reason = FinishReason(type="abort", message="not finite") if ending == "abort" else whole.finish_reason
            return replace(whole, finish_reason=reason)

        sampler = FakeSampler(says)
        benchmark = open_benchmark(stage.evaluation.benchmarks[0], seed=int(stage.seed))
        generator = RolloutGenerator(stage, sampler, None, encoding, renderer.stop_ids)
        asked = PolicyBenchmark(benchmark, generator, renderer, context=64)
        return asked, sampler, stage, renderer

    return made


def test_a_policy_is_asked_what_an_eval_stage_asks_and_scored_as_there(opened):
    values = {"num_samples": 2, "temperature": 0.7, "metrics": ["pass@2"], "stop": ["END"], "max_new_tokens": 9}
    answers = iter(["#### 0", "x", "#### 1END#### 5", "#### 1", "no", "#### 3"])
    asked, sampler, stage, renderer = opened(lambda: (next(answers), "stop"), **values)
    found = asyncio.run(asked.result())
    benchmark = open_benchmark(stage.evaluation.benchmarks[0], seed=5)
    limits = {"max_new_tokens": 16, "stop_token_ids": renderer.stop_ids}
    asked_for = [(item, n) for item in benchmark.items[:3] for n in range(2)]
    wanted = [(renderer.prompt(item.messages), benchmark.params(item, n, **limits)) for item, n in asked_for]
    assert [(request.input_ids, request.params) for request in sampler.requests] == wanted
    assert [request.params.max_new_tokens for request in sampler.requests] == [9] * 6
    # of 4 items two have a right sample in 2; the last does not fit and counts as wrong
    assert found.metric == "pass@2" and found.scores["pass@2"].value == 2 / 4
    assert found.scores["avg@2"].value == (1 / 2 + 2 / 2 + 0 + 0) / 4
    assert found.counts["too_long"] == 1 and found.records[1]["samples"][0]["output"] == "#### 1"


def test_an_answer_that_reached_its_limit_is_counted_and_one_that_was_given_up_ends_the_evaluation(opened):
    asked, sampler, *_ = opened(lambda: ("#### 1", "length"))
    found = asyncio.run(asked.result())
    assert found.counts["truncated"] == 3 and found.scores["exact_match"].value == 1 / 4
    assert [request.params.max_new_tokens for request in sampler.requests] == [16] * 3
    asked, *_ = opened(lambda: ("", "abort"))
    with pytest.raises(SamplerError, match="The sampler ended request r: not finite"):
        asyncio.run(asked.result())


def test_thinking_between_special_tokens_is_left_out_and_other_special_tokens_are_no_text(opened):
    tags = {"begin": "<|tool_call|>", "end": "<|tool_call_end|>"}
    asked, *_ = opened(lambda: (f"{tags['begin']}hm{tags['end']}<|pad|>#### 1", "stop"), thinking=tags)
    record = asyncio.run(asked.result()).records[1]
    assert (record["output"], record["thinking"], record["scores"]["exact_match"]) == ("#### 1", "hm", 1.0)


def test_each_named_set_has_its_interval_and_the_start_can_be_left_out():
    sets = [{"name": "often", "every": 2}, {"name": "rare", "every": 9}, {"name": "default"}]
    section = config(benchmarks=sets, eval_every=4, eval_at_start=False).evaluation
    times = {"eval_reward": [4, 8, 10], "often": [2, 4, 6, 8, 10], "rare": [9, 10], "default": [4, 8, 10]}
    for name, steps in times.items():
        assert [step for step in range(11) if section.is_time(name, step, num_steps=10)] == steps, name
    assert config(eval_every=4).evaluation.is_time("eval_reward", 0, num_steps=10)
