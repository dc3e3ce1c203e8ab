"""Later turns of a conversation: only what no slot holds of a prompt is run."""

import itertools

import numpy as np
import pytest

from nanodag.sampler import model
from tests.sampler.reference import make_engine, request

FIRST = [[11, 4, 90, 3, 22], [8, 8, 31], [140, 2, 2, 57, 6, 19, 1], [5]]
TOOLS = [[60, 61], [62, 63, 64, 65], [66]]
WINDOW = {"kind": "mistral", "sliding_window": 16}


@pytest.fixture(params=["compiled", "torch", "compiled window", "torch window"])
def folder(request, make_checkpoint, monkeypatch):
    """A checkpoint, run by compiled code or by torch, also with a window that is shorter than a conversation."""
    if "torch" in request.param:
        monkeypatch.setattr(model, "bind", lambda *parts: None)
    return make_checkpoint(**WINDOW if "window" in request.param else {"kind": "qwen3"})


def play(engine, firsts, tools, **params):
    """Conversations that take their turns together: for each turn, the requests and their samples. Turns differ in
    length, so that samples end at different steps and move."""
    prompts, turns = [list(first) for first in firsts], []
    for number in range(len(tools) + 1):
        asked = [
            request(prompt, max_new_tokens=4 + 3 * ((index + number) % 4), sampling_seed=index, **params)
            for index, prompt in enumerate(prompts)
        ]
        samples = [sample for (sample,) in engine.generate(asked)]
        turns.append((asked, samples))
        for prompt, sample in zip(prompts, samples, strict=True):
            prompt += sample.output_ids + (tools[number] if number < len(tools) else [])
    return turns


def bits(samples):
    return [(sample.output_ids, sample.logprobs) for sample in samples]


def alone(folder, asked, **settings):
    """Samples of requests, each from an engine that has run nothing else."""
    return [make_engine(folder, max_batch=4, **settings).generate([one])[0][0] for one in asked]


def check_same(samples, expected):
    for sample, other in zip(samples, expected, strict=True):
        assert sample.output_ids == other.output_ids
        np.testing.assert_allclose(sample.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_later_turns_are_those_of_a_fresh_engine_and_run_only_what_is_new(folder, temperature):
    turns = play(make_engine(folder, max_batch=8), FIRST, TOOLS, temperature=temperature)
    for (before, ended), (asked, samples) in itertools.pairwise(turns):
        held = [len(old.input_ids) + len(end.output_ids) - 1 for old, end in zip(before, ended, strict=True)]
        assert [sample.num_cached_tokens for sample in samples] == held
        check_same(samples, alone(folder, asked))


def test_four_turns_run_at_most_1_3_times_the_tokens_of_the_conversation(folder):
    engine = make_engine(folder, max_batch=4)
    run, original = [], engine.model.prefill

    def prefill(prompts, slots, starts):
        run.extend(len(prompt) - start for prompt, start in zip(prompts, starts, strict=True))
        original(prompts, slots, starts)

    engine.model.prefill = prefill
    asked, samples = play(engine, FIRST[:1], TOOLS)[-1]
    assert sum(run) <= 1.3 * (len(asked[0].input_ids) + len(samples[0].output_ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_in_deterministic_mode_later_turns_have_the_bits_of_a_fresh_engine(
    make_checkpoint, monkeypatch, dtype, is_compiled
):
    if not is_compiled:
        monkeypatch.setattr(model, "bind", lambda *parts: None)
    folder, settings = make_checkpoint("qwen3"), {"dtype": dtype, "deterministic": True}
    asked, samples = play(make_engine(folder, max_batch=4, **settings), FIRST, TOOLS)[-1]
    assert bits(samples) == bits(alone(folder, asked, **settings))
    assert all((sample.num_cached_tokens > 0) == is_compiled for sample in samples)


@pytest.mark.parametrize("num_steps", [2, 100], ids=["while a turn runs", "between turns"])
def test_new_weights_and_a_flush_forget_what_slots_hold(folder, num_steps):
    engine, ended = make_engine(folder, max_batch=4), []
    first = request(FIRST[0], sampling_seed=0)
    engine.submit(first, lambda index, completion: ended.append(completion))
    for _ in range(num_steps):
        if engine.has_work:
            engine.step()
    changed = engine.load(folder)
    for tensor in changed.tensors():
        tensor.mul_(0.9)
    engine.update_weights(changed, folder, "1")
    while engine.has_work:
        engine.step()
    second = request([*FIRST[0], *ended[0].output_ids, *TOOLS[0]], sampling_seed=0)
    fresh = make_engine(folder, max_batch=4)
    fresh.update_weights(changed, folder, "1")
    ((sample,),), ((expected,),) = engine.generate([second]), fresh.generate([second])
    assert sample.num_cached_tokens == 0
    assert bits([sample]) == bits([expected])
    engine.forget_prompts()
    assert engine.generate([second])[0][0].num_cached_tokens == 0


def test_an_aborted_sample_is_continued_from_what_its_slot_holds(folder):
    engine, ended = make_engine(folder, max_batch=4), []
    engine.submit(request(FIRST[0], rid="mine"), lambda index, completion: ended.append(completion))
    for _ in range(6):
        engine.step()
    engine.abort(lambda running: running.rid == "mine", "enough")
    asked = request([*FIRST[0], *ended[0].output_ids], sampling_seed=4)
    ((sample,),) = engine.generate([asked])
    assert sample.num_cached_tokens == len(FIRST[0]) + 5
    check_same([sample], alone(folder, [asked]))


def test_all_samples_of_a_later_turn_start_from_what_one_slot_holds(folder):
    engine = make_engine(folder, max_batch=4)
    asked, samples = play(engine, FIRST[:2], [])[0]
    prompt = [*asked[0].input_ids, *samples[0].output_ids, *TOOLS[0]]
    several = request(prompt, n=6, sampling_seed=2)
    (found,) = engine.generate([several])
    (expected,) = make_engine(folder, max_batch=8).generate([several])
    assert [sample.num_cached_tokens for sample in found] == [len(prompt) - 3] + [len(prompt)] * 5
    check_same(found, expected)


def test_a_prompt_that_is_just_what_a_slot_holds_runs_its_last_token(folder):
    engine = make_engine(folder, max_batch=4)
    ((asked,), (sample,)) = play(engine, FIRST[:1], [])[0]
    again = request([*asked.input_ids, *sample.output_ids[:-1]], sampling_seed=3)
    ((found,),) = engine.generate([again])
    assert found.num_cached_tokens == len(again.input_ids) - 1
    check_same([found], alone(folder, [again]))


def test_what_a_slot_holds_stays_while_others_run_beside_it(folder):
    engine, ended = make_engine(folder, max_batch=8), {}
    first = request(range(20, 60), max_new_tokens=4, sampling_seed=0)
    for number, asked in enumerate([first, *(request((number, 9), max_new_tokens=60) for number in range(4))]):
        engine.submit(asked, lambda index, completion, number=number: ended.setdefault(number, completion))
    while not ended:
        engine.step()
    engine.submit(request((7, 7), max_new_tokens=60), lambda index, completion: None)
    for _ in range(8):
        engine.step()
    second = request([*first.input_ids, *ended[0].output_ids, *TOOLS[0]], sampling_seed=0)
    engine.submit(second, lambda index, completion: ended.setdefault("second", completion))
    while engine.has_work:
        engine.step()
    assert ended["second"].num_cached_tokens == 43
    check_same([ended["second"]], alone(folder, [second]))


def test_the_slot_that_was_used_longest_ago_is_overwritten_first(make_checkpoint):
    engine = make_engine(make_checkpoint("qwen3"), max_batch=2)
    (mine,) = play(engine, FIRST[:1], TOOLS[:1])[-1][0]
    ((old,), (answer,)) = play(engine, [[99, 98]], [])[0]
    mine = request([*mine.input_ids, *engine.generate([mine])[0][0].output_ids])
    assert engine.generate([mine])[0][0].num_cached_tokens > 0
    engine.generate([request((33, 34))])
    assert engine.generate([mine])[0][0].num_cached_tokens > 0
    assert engine.generate([request([*old.input_ids, *answer.output_ids])])[0][0].num_cached_tokens == 0
