"""The compiled decode step against torch's: the same tokens, and rows that do not see one another."""

import shutil

import numpy as np
import pytest
import torch

from nanodag.sampler import kernel, model
from nanodag.sampler.engine import Engine
from nanodag.sampler.kernel import PROMPT_ROWS
from nanodag.sampler.protocol import Request, SamplingParams
from nanodag.sampler.slots import SlotTable
from nanodag.sampler.steps import CompiledSteps

# SplitMix64's finalizer makes the largest number of this key at count 0: uniforms() is 1 - 2^-53.
KEY_OF_THE_LARGEST = 0x31628AF67B2131AB
SHAPE = {"hidden_size": 64, "intermediate_size": 80}  # 80: one panel of columns and a rest


def requests(count):
    """Ragged prompts, drawn in every way."""
    rng = np.random.default_rng(0)
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 5}]
    return [
        Request(
            input_ids=rng.integers(0, 150, size=1 + 7 * index % 60).tolist(),
            params=SamplingParams(max_new_tokens=40, ignore_eos=True, sampling_seed=index, **kinds[index % 5]),
        )
        for index in range(count)
    ]


@pytest.fixture
def torch_engine(monkeypatch):
    def make(folder, **options):
        with monkeypatch.context() as patch:
            patch.setattr(model, "bind", lambda *parts: None)
            return Engine(folder, **options)

    return make


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_it_draws_what_torch_draws(make_checkpoint, torch_engine, kind, tied):
    folder = make_checkpoint(kind, **SHAPE, tie_word_embeddings=tied)
    compiled, plain = Engine(folder, dtype="float32"), torch_engine(folder, dtype="float32")
    assert compiled.model.kernel is not None
    assert plain.model.kernel is None
    found = [sample for of_request in compiled.generate(requests(20)) for sample in of_request]
    wanted = [sample for of_request in plain.generate(requests(20)) for sample in of_request]
    assert [sample.output_ids for sample in found] == [sample.output_ids for sample in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 128])
def test_a_row_has_the_same_bits_among_any_number_of_rows(make_checkpoint, head_dim):
    engine = Engine(make_checkpoint("qwen3", **SHAPE, head_dim=head_dim), dtype="float32", max_batch=20)
    decoder, prompt, table = engine.model, np.arange(37), SlotTable(20, 64)
    steps = CompiledSteps(decoder.kernel, table)
    seen = []
    for rows in range(1, 21):
        decoder.prefill([prompt], [list(range(20))])
        table.positions[:], table.tokens[:] = len(prompt), 11
        steps.decode(rows)
        scores = steps.score(rows).clone()
        assert torch.equal(scores, scores[:1].expand_as(scores)), rows
        seen.append((decoder.buffers.hidden[0].clone(), scores[0]))
    for hidden, scores in seen[1:]:
        assert torch.equal(hidden, seen[0][0])
        assert torch.equal(scores, seen[0][1])


@pytest.mark.parametrize("head_dim", [32, 48])
@pytest.mark.parametrize("length", [1, PROMPT_ROWS, PROMPT_ROWS + 1, 200])
def test_a_prompt_leaves_the_bits_that_decoding_it_token_by_token_leaves(make_checkpoint, head_dim, length):
    engine = Engine(make_checkpoint("qwen2", **SHAPE, head_dim=head_dim), dtype="float32", max_batch=3)
    decoder, table = engine.model, SlotTable(3, 256)
    steps, buffers = CompiledSteps(decoder.kernel, table), decoder.buffers
    prompts = [np.random.default_rng(seed).integers(0, 150, size=size) for seed, size in ((0, 5), (1, length))]
    decoder.prefill(prompts, [[2], [1]])
    table.active[0] = True
    for token in prompts[1]:
        table.tokens[0] = token
        steps.decode(1)
    num_kv = engine.checkpoint.architecture.num_kv_heads
    for cache in (*buffers.keys, *buffers.values):
        slots = cache.view(3, num_kv, *cache.shape[1:])
        assert torch.equal(slots[1, :, :length], slots[0, :, :length])
    assert torch.equal(buffers.prompt_hidden[1], buffers.hidden[0])


def drawing_from(engine, *, greedy, key):
    """The kernel's draw for a table with one row, which nothing was drawn for yet."""
    table = SlotTable(1, 4)
    table.active[:], table.greedy[:], table.keys[:], table.limits[:] = True, greedy, key, 4
    steps = CompiledSteps(engine.model.kernel, table)
    return table, lambda: engine.model.kernel.draw(steps._reference, 1)


def test_scores_that_are_not_finite_break_a_row_and_nothing_is_recorded_for_it(make_checkpoint):
    engine = Engine(make_checkpoint("qwen3", **SHAPE), dtype="float32", max_batch=1)
    for greedy in (False, True):
        table, draw = drawing_from(engine, greedy=greedy, key=2)
        engine.model.buffers.logits.zero_()
        assert draw() == 0
        assert table.counts[0] == 1
        assert np.isfinite(table.logprobs[0, 0])
        engine.model.buffers.logits[0, 5] = float("nan")
        assert draw() == 1
        assert table.counts[0] == 1


def test_a_token_without_probability_is_never_drawn(make_checkpoint):
    """The sum of a block is rounded: a number that falls beyond what its elements add up to must not take the next."""
    engine = Engine(make_checkpoint("qwen3", **SHAPE), dtype="float32", max_batch=1)
    scores, possible = engine.model.buffers.logits, [130, 131, 149]
    table, draw = drawing_from(engine, greedy=False, key=KEY_OF_THE_LARGEST)
    for small in np.linspace(-18.0, -0.1, 400):
        scores.fill_(-torch.inf)
        scores[0, possible] = torch.tensor([0.0, small, small], dtype=torch.float32)
        table.counts[0] = 0
        draw()
        assert table.tokens[0] in possible
        assert np.flatnonzero(scores[0].numpy()).tolist() == possible


@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size", "dtype"), [(40, 80, "float32"), (64, 60, "float32"), (64, 1056, "bfloat16")]
)
def test_other_shapes_and_dtypes_are_left_to_torch(make_checkpoint, hidden_size, intermediate_size, dtype):
    folder = make_checkpoint("qwen3", hidden_size=hidden_size, intermediate_size=intermediate_size)
    assert Engine(folder, dtype=dtype).model.kernel is None


def test_without_a_compiler_torch_decodes_and_a_warning_says_so(make_checkpoint, monkeypatch, caplog):
    folder = make_checkpoint("qwen3", **SHAPE)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    kernel._library.cache_clear()
    try:
        engine = Engine(folder, dtype="float32")
    finally:
        kernel._library.cache_clear()
    assert engine.model.kernel is None
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NANODAG_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel, "FLAGS", ("-no-such-flag",))
    kernel._library.cache_clear()
    try:
        assert kernel._library() is None
    finally:
        kernel._library.cache_clear()
    assert "no-such-flag" in caplog.text
    assert list(tmp_path.iterdir()) == []
