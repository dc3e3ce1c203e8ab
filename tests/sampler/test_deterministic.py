"""Deterministic mode: the same bits for a request, whoever runs beside it, and after a restart."""

import itertools

import numpy as np
import pytest
import torch

from nanodag.errors import BadRequest
from nanodag.sampler import model
from tests.sampler.reference import make_engine, request

WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}


def subject(**changes):
    params = {"max_new_tokens": 90, "temperature": 0.7, "sampling_seed": 42, "n": 2, **changes}
    return request([5, 17, 99, 3, 60, 8, 1], "subject", **params)


def crowd(count, seed=0):
    """Requests of all kinds: lengths from 1 to 150, greedy, top-p, top-k, several samples."""
    rng = np.random.default_rng(seed)
    kinds = [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 5}, {"top_k": 40, "top_p": 0.9, "temperature": 1.3}]
    made = []
    for index in range(count):
        prompt = rng.integers(0, 150, size=int(rng.integers(1, 120))).tolist()
        limit = int(rng.integers(1, 100))
        made.append(request(prompt, max_new_tokens=limit, sampling_seed=index, **kinds[index % 5]))
    return made


def bits(completions):
    return [(completion.output_ids, completion.logprobs) for completion in completions]


def after_some_steps(engine, wanted, others, num_steps):
    """Submit ``others``, make some steps, then admit the request."""
    found = {}
    for other in others:
        engine.submit(other, lambda index, completion: None)
    for _ in range(num_steps):
        engine.step()
    engine.submit(wanted, found.__setitem__)
    while len(found) < wanted.params.n:
        engine.step()
    return [found[index] for index in range(wanted.params.n)]


@pytest.fixture(scope="module")
def folder(make_checkpoint):
    return make_checkpoint("qwen3")


@pytest.fixture(scope="module")
def alone(folder):
    """The bits of the subject's samples, whose engine has nothing else to do."""
    return bits(make_engine(folder, deterministic=True).generate([subject()])[0])


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("changes", [{}, {"top_p": 0.6}, {"top_k": 9}, {"temperature": 0.0}])
def test_alone_among_others_and_admitted_later_give_the_same_bits(folder, changes, is_compiled, monkeypatch):
    if not is_compiled:
        monkeypatch.setattr(model, "bind", lambda *parts: None)
    wanted = subject(**changes)
    (alone,) = make_engine(folder, max_batch=64, deterministic=True).generate([wanted])
    among = make_engine(folder, max_batch=64, deterministic=True).generate([*crowd(40), wanted, *crowd(22, seed=1)])[40]
    later = after_some_steps(make_engine(folder, max_batch=64, deterministic=True), wanted, crowd(63), 37)
    assert bits(among) == bits(alone)
    assert bits(later) == bits(alone)


@pytest.mark.parametrize(
    ("kind", "dtype", "config"), [("llama", "float32", {}), ("qwen2", "bfloat16", {}), ("qwen3", "bfloat16", WIDE)]
)
def test_other_types_sizes_and_dtypes_give_the_same_bits_in_company(make_checkpoint, kind, dtype, config):
    folder = make_checkpoint(kind, **config)
    (alone,) = make_engine(folder, dtype=dtype, deterministic=True).generate([subject()])
    engine = make_engine(folder, dtype=dtype, deterministic=True)
    assert bits(after_some_steps(engine, subject(), crowd(63), 37)) == bits(alone)


def test_waiting_for_a_slot_and_finding_the_prompt_in_the_cache_give_the_same_bits(folder, alone):
    engine = make_engine(folder, max_batch=4, deterministic=True)
    queued = engine.generate([*crowd(20), subject()])[-1]
    (cached,) = engine.generate([subject()])
    assert bits(queued) == bits(cached) == alone


def test_samples_do_not_depend_on_how_many_there_are(folder, alone):
    (eight,) = make_engine(folder, deterministic=True).generate([subject(n=8)])
    assert bits(eight)[:2] == alone
    assert len({tuple(completion.output_ids) for completion in eight}) == 8


def test_weights_reloaded_from_disk_give_the_same_bits(folder, alone, make_checkpoint):
    engine = make_engine(folder, deterministic=True)
    other = make_checkpoint("qwen3", seed=1)
    engine.update_weights(engine.load(other), other, "1")
    (changed,) = engine.generate([subject()])
    engine.update_weights(engine.load(folder), folder, "2")
    (after,) = engine.generate([subject()])
    assert bits(after) == alone != bits(changed)
    assert bits(changed) == bits(make_engine(other, deterministic=True).generate([subject()])[0])


def test_a_retracted_sample_continues_with_the_same_bits_where_prompts_are_compiled(folder, alone):
    engine, found = make_engine(folder, deterministic=True), {}
    engine.submit(subject(), found.__setitem__)
    for step in itertools.count():
        if step in (1, 40):
            engine.retract()
        if not engine.has_work:
            break
        engine.step()
    assert bits([found[0], found[1]]) == alone


def test_deterministic_mode_refuses_several_threads(folder):
    torch.set_num_threads(2)
    try:
        with pytest.raises(BadRequest, match="one torch thread"):
            make_engine(folder, deterministic=True)
    finally:
        torch.set_num_threads(1)
