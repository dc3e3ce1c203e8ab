"""Responses that go on in later steps: from where they were, by whom, and what becomes of their prompts."""

import asyncio
import json

from tests.rl.fakes import STOP, FakePool, FakeSampler, cursor_over, dropped, generator, ids, kept

LONGEST = 6


def writes(texts: dict[int, list[str]]) -> FakeSampler:
    """Sample i of prompt n is to become `texts[n][i]` and then stop; it is written on from wherever it is asked for."""

    def says(request):
        number, sofar = request.input_ids[0] - 1, request.input_ids[1:]
        wholes = [[*map(ord, text), STOP] for text in texts[number]]
        if request.params.n == 1:
            wholes = [wholes[int(request.rid.rpartition("-")[2])]]
        return [whole[len(sofar) :] for whole in wholes]

    return FakeSampler(says)


def steps_of(sampler: FakeSampler, **values):
    """step(cursor, number): what the step with that number makes, sampled by the weights of the one before it."""
    options = {"partial_rollout_tokens": 2, "max_new_tokens": LONGEST, "over_sampling": 2} | values
    made = generator(sampler, FakePool(len), **options)

    def step(cursor, number: int):
        sampler.version = number - 1
        return asyncio.run(made.step(cursor, number))

    return step


def test_groups_that_are_not_finished_when_a_step_is_full_go_on_in_the_next_and_tokens_keep_their_version(tmp_path):
    step = steps_of(writes({0: ["a", "abcd"], 1: ["a", ""], 2: ["", "a"]}), prompts_per_step=1)
    cursor = cursor_over(tmp_path, [1] * 3)
    first, second = step(cursor, 1), step(cursor, 2)
    assert [(kept(batch), batch.num_partial) for batch in (first, second)] == [(["p1"], 1), (["p2"], 1)]
    ((prompt, (short, long)),) = step(cursor, 3).kept
    assert prompt.prompt_id == "p0" and prompt.begun == ()
    assert short.sampled_token_ids == (ord("a"), STOP) and short.versions == (0, 0)
    assert long.sampled_token_ids == (*map(ord, "abcd"), STOP) and long.versions == (0, 0, 1, 1, 2)
    assert long.finish_reason == "stop" and (short.reward, long.reward) == (1.0, 4.0)


def test_a_step_goes_on_in_rounds_and_refills_until_it_has_its_groups(tmp_path):
    step = steps_of(writes({0: ["abc", "a"], 1: ["a", "a"], 2: ["", "a"], 3: ["", "a"]}), filters=["nonzero_spread"])
    cursor = cursor_over(tmp_path, [1] * 5)
    batch = step(cursor, 1)
    assert kept(batch) == ["p0", "p2"] and batch.num_partial == 0 and dropped(batch) == [("p1", "zero_spread")]
    assert ids(cursor.take(1)) == ["p3"]


def test_what_is_finished_and_not_needed_is_begun_again_in_the_next_step(tmp_path):
    cursor = cursor_over(tmp_path, [1] * 4)
    steps_of(writes({n: ["", "a"] for n in range(4)}), prompts_per_step=1)(cursor, 1)
    assert [(prompt.prompt_id, prompt.begun) for prompt in cursor.take(1)] == [("p1", ())]


def test_only_the_unfinished_sample_is_asked_for_again_with_what_it_has_and_a_seed_of_its_own(tmp_path):
    sampler = writes({0: ["abcd", "abcdefgh"], 1: ["", "abcdefgh"]})
    ((_, group),) = steps_of(sampler, prompts_per_step=1)(cursor_over(tmp_path, [1] * 2), 2).kept
    begun, again = sampler.requests[0], [r for r in sampler.requests[2:] if r.input_ids[0] == 1]
    assert begun.params.n == 2 and begun.params.max_new_tokens == 2
    assert [r.rid for r in again] == ["step-2-p0@0-0", "step-2-p0@0-1"] * 2
    assert [r.input_ids for r in again] == [[1, *map(ord, "ab")]] * 2 + [[1, *map(ord, "abcd")]] * 2
    assert len({r.params.sampling_seed for r in sampler.requests if r.input_ids[0] == 1}) == 5
    assert [r.num_sampled for r in group] == [5, LONGEST] and group[1].finish_reason == "length"


def test_what_was_begun_survives_a_save(tmp_path):
    step = steps_of(writes({0: ["abcde", "a"], 1: ["", "a"]}), prompts_per_step=1)
    cursor = cursor_over(tmp_path, [1] * 2)
    assert step(cursor, 1).num_partial == 1
    saved = json.loads(json.dumps(cursor.state_dict()))
    whole = step(cursor, 2)
    again = cursor_over(tmp_path, [1] * 2)
    again.load_state_dict(saved)
    assert step(again, 2).kept == whole.kept and again.state_dict() == cursor.state_dict()
