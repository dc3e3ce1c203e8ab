"""Responses that go on in later steps: from where they were, by whom, and what becomes of their prompts."""

import asyncio
import json

import pytest

from nanodag.config.kinds.rl import RLStage
from nanodag.inference.protocol import Completion, FinishReason, VersionSpan
from nanodag.rl.control.generation import RolloutGenerator
from tests.rl.test_generation import STOP, FakeEncoding, FakePool, config, cursor_over, ids

LONGEST = 6


class WritingSampler:
    """Sample i of prompt n is to become `texts[n][i]` and then stop; it writes on from wherever it is asked to."""

    def __init__(self, texts: dict[int, list[str]]) -> None:
        self.texts, self.version, self.requests, self.aborted = texts, 0, [], []

    async def generate(self, requests):
        self.requests += requests
        return [self.answers(request) for request in requests]

    async def abort(self, rid) -> None:
        self.aborted.append(rid)

    def answers(self, request):
        number, sofar = request.input_ids[0] - 1, request.input_ids[1:]
        wanted = [[*map(ord, text), STOP] for text in self.texts[number]]
        if request.params.n == 1:
            wanted = [wanted[int(request.rid.rpartition("-")[2])]]
        return [self.completion(request, full[len(sofar) :]) for full in wanted]

    def completion(self, request, rest: list[int]) -> Completion:
        given = rest[: request.params.max_new_tokens]
        version = str(self.version)
        return Completion(
            rid=request.rid,
            output_ids=given,
            logprobs=[-0.5] * len(given),
            finish_reason=FinishReason(type="stop" if given[-1] == STOP else "length"),
            weight_version=version,
            weight_versions=[VersionSpan(version=version, start=0, end=len(given))],
            num_prompt_tokens=len(request.input_ids),
        )


class Lengths(FakePool):
    """The reward of an answer is how long it is."""

    def _score(self, completion):
        return super()._score(str(len(completion)))


def generator(sampler: WritingSampler, **values) -> RolloutGenerator:
    options = {"partial_rollout_tokens": 2, "max_new_tokens": LONGEST, "over_sampling": 2} | values
    return RolloutGenerator(config(**options), sampler, Lengths(), FakeEncoding(), (STOP,))


def step(made: RolloutGenerator, cursor, number: int):
    made._sampler.version = number - 1
    return asyncio.run(made.step(cursor, number))


def test_groups_that_are_not_finished_when_a_step_is_full_go_on_in_the_next_and_tokens_keep_their_version(tmp_path):
    sampler = WritingSampler({0: ["a", "abcd"], 1: ["a", ""], 2: ["", "a"]})
    made, cursor = generator(sampler, prompts_per_step=1), cursor_over(tmp_path, [1] * 3)
    first = step(made, cursor, 1)
    assert ids(prompt for prompt, _ in first.kept) == ["p1"] and first.num_partial == 1
    second = step(made, cursor, 2)
    assert ids(prompt for prompt, _ in second.kept) == ["p2"] and second.num_partial == 1
    ((prompt, (short, long)),) = step(made, cursor, 3).kept
    assert prompt.prompt_id == "p0" and prompt.begun == ()
    assert short.sampled_token_ids == (ord("a"), STOP) and short.versions == (0, 0)
    assert long.sampled_token_ids == (*map(ord, "abcd"), STOP) and long.versions == (0, 0, 1, 1, 2)
    assert long.finish_reason == "stop" and (short.reward, long.reward) == (1.0, 4.0)


def test_a_step_goes_on_in_rounds_and_refills_until_it_has_its_groups(tmp_path):
    sampler = WritingSampler({0: ["abc", "a"], 1: ["a", "a"], 2: ["", "a"], 3: ["", "a"]})
    made, cursor = generator(sampler, filters=["nonzero_spread"]), cursor_over(tmp_path, [1] * 5)
    found = step(made, cursor, 1)
    assert ids(prompt for prompt, _ in found.kept) == ["p0", "p2"] and found.num_partial == 0
    assert ids(drop.prompt for drop in found.dropped) == ["p1"]
    assert ids(cursor.take(1)) == ["p3"]


def test_what_is_finished_and_not_needed_is_begun_again_in_the_next_step(tmp_path):
    sampler = WritingSampler({n: ["", "a"] for n in range(4)})
    made, cursor = generator(sampler, prompts_per_step=1), cursor_over(tmp_path, [1] * 4)
    step(made, cursor, 1)
    assert [(prompt.prompt_id, prompt.begun) for prompt in cursor.take(1)] == [("p1", ())]


def test_only_the_unfinished_sample_is_asked_for_again_with_what_it_has_and_a_seed_of_its_own(tmp_path):
    sampler = WritingSampler({0: ["abcd", "abcdefgh"], 1: ["", "abcdefgh"]})
    made, cursor = generator(sampler, prompts_per_step=1), cursor_over(tmp_path, [1] * 2)
    ((_, group),) = step(made, cursor, 2).kept
    begun, again = sampler.requests[0], [r for r in sampler.requests[2:] if r.input_ids[0] == 1]
    assert begun.params.n == 2 and begun.params.max_new_tokens == 2
    assert [r.rid for r in again] == ["step-2-p0@0-0", "step-2-p0@0-1"] * 2
    assert [r.input_ids for r in again] == [[1, *map(ord, "ab")]] * 2 + [[1, *map(ord, "abcd")]] * 2
    assert len({r.params.sampling_seed for r in sampler.requests if r.input_ids[0] == 1}) == 5
    assert [r.num_sampled for r in group] == [5, LONGEST] and group[1].finish_reason == "length"


def test_what_was_begun_survives_a_save(tmp_path):
    sampler = WritingSampler({0: ["abcde", "a"], 1: ["", "a"]})
    made, cursor = generator(sampler, prompts_per_step=1), cursor_over(tmp_path, [1] * 2)
    assert step(made, cursor, 1).num_partial == 1
    saved = json.loads(json.dumps(cursor.state_dict()))
    whole = step(made, cursor, 2)
    again = cursor_over(tmp_path, [1] * 2)
    again.load_state_dict(saved)
    assert step(made, again, 2).kept == whole.kept and again.state_dict() == cursor.state_dict()


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match=r"needs partial_rollout_tokens \(found 8\) and max_staleness \(found 0\)"):
        RLStage(kind="rl", data=["file:x"], over_sampling=64, partial_rollout_tokens=8, partial_rollouts="correct")
    with pytest.raises(ValueError, match="partial_rollout_tokens 8 needs over_sampling"):
        RLStage(kind="rl", data=["file:x"], partial_rollout_tokens=8)
