"""The compiled decode step against torch's: the same tokens, and rows that do not see one another."""

import shutil

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from nanodag.errors import MissingTool
from nanodag.model import c_library
from nanodag.sampler import kernel, model, weights
from nanodag.sampler.kernel import PROMPT_ROWS
from nanodag.sampler.slots import SlotTable
from nanodag.sampler.steps import CompiledSteps
from tests.sampler.reference import make_engine, request

# SplitMix64's finalizer makes the largest number of this key at count 0: uniforms() is 1 - 2^-53.
KEY_OF_THE_LARGEST = 0x31628AF67B2131AB
SHAPE = {"hidden_size": 64, "intermediate_size": 80}  # 80: one panel of columns and a rest


def requests(count):
    """Ragged prompts, drawn in every way."""
    rng = np.random.default_rng(0)
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 5}]
    prompts = [rng.integers(0, 150, size=1 + 7 * index % 60).tolist() for index in range(count)]
    return [
        request(prompt, max_new_tokens=40, sampling_seed=index, **kinds[index % 5])
        for index, prompt in enumerate(prompts)
    ]


def samples_of(engine):
    return [sample for (sample,) in engine.generate(requests(20))]


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request, monkeypatch):
    """Of the matrices, all of them however small."""
    monkeypatch.setattr(weights, "MIN_BFLOAT16_ELEMENTS", 0)
    return request.param


@pytest.fixture
def torch_engine(monkeypatch):
    def make(folder, **options):
        with monkeypatch.context() as patch:
            patch.setattr(model, "bind", lambda *parts: None)
            return make_engine(folder, **options)

    return make


WIDE = {"vocab_size": 1100}  # columns of so wide a matrix are gathered


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "more"), [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("qwen3", WIDE)])
def test_it_draws_what_torch_draws_and_a_row_alone_has_the_same_bits(make_checkpoint, torch_engine, kind, tied, more):
    folder = make_checkpoint(kind, **SHAPE, **more, tie_word_embeddings=tied)
    compiled, plain = make_engine(folder, dtype="float32"), torch_engine(folder, dtype="float32")
    assert compiled.model.kernel is not None
    assert plain.model.kernel is None
    found, wanted = samples_of(compiled), samples_of(plain)
    assert [sample.output_ids for sample in found] == [sample.output_ids for sample in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert compiled.generate(requests(20)[7:8])[0][0].logprobs == found[7].logprobs


@pytest.mark.parametrize("tied", [False, True])
def test_in_bfloat16_it_rounds_what_goes_into_a_product_and_nothing_else(
    make_checkpoint, torch_engine, monkeypatch, tied
):
    """The oracle: torch in float32 with bfloat16 weights, whose products get rounded inputs. torch's own bfloat16
    products also round what they give."""

    def rounded(x, matrix):
        return x.bfloat16().float() @ matrix.float()

    monkeypatch.setattr(weights, "MIN_BFLOAT16_ELEMENTS", 0)
    folder = make_checkpoint("qwen2", **SHAPE, tie_word_embeddings=tied)
    compiled, plain, exact = (make(folder, dtype="bfloat16") for make in (make_engine, torch_engine, torch_engine))
    assert compiled.model.kernel is not None
    found, bare = samples_of(compiled), samples_of(plain)
    monkeypatch.setattr(
        model, "_multiply", lambda x, matrix, bias=0: rounded(x, matrix) + (0 if bias is None else bias)
    )
    wanted = samples_of(exact)
    near, far = apart(found, wanted), apart(bare, wanted)
    assert np.median(near) < 1e-6
    assert np.median(far) > 1e-3
    assert [sample.output_ids[0] for sample in found] == [sample.output_ids[0] for sample in wanted]


class RoundingCache(DynamicCache):
    """transformers' own, whose keys and values are rounded as they come."""

    def update(self, keys, values, *more, **options):
        return super().update(keys.bfloat16().to(keys.dtype), values.bfloat16().to(values.dtype), *more, **options)


@pytest.mark.parametrize("head_dim", [48, 96])
def test_a_cache_of_bfloat16_rounds_keys_and_values_once_and_attention_nothing(make_model, tmp_path, head_dim):
    """The oracle: transformers in float64, whose cache rounds. Weights are rounded beforehand and gains are 1, and
    matrices that are so small are multiplied in float32, so nothing else differs."""
    rounded = make_model("llama", **SHAPE, head_dim=head_dim)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            parameter.copy_(torch.ones(()) if name.endswith("norm.weight") else parameter.bfloat16())
    rounded.save_pretrained(tmp_path)
    rounded.double()
    engine = make_engine(tmp_path, dtype="bfloat16")
    assert engine.model.kernel is not None
    assert engine.model.weights.layers[0].qkv.dtype == torch.float32
    assert {cache.dtype for cache in (*engine.model.buffers.keys, *engine.model.buffers.values)} == {torch.bfloat16}
    asked = requests(5)
    near, far = [], []
    for wanted, (sample,) in zip(asked, engine.generate(asked), strict=True):
        ids, start = torch.tensor([wanted.input_ids + sample.output_ids]), len(wanted.input_ids) - 1
        for cache, differences in ((RoundingCache(), near), (DynamicCache(), far)):
            with torch.no_grad():
                logits = rounded(ids, past_key_values=cache).logits[0, start:-1] / (wanted.params.temperature or 1.0)
            logprobs = logits.log_softmax(-1).gather(1, ids[0, start + 1 :, None])[:, 0]
            differences += (logprobs - torch.tensor(sample.logprobs)).abs().tolist()
    assert 100 * np.median(near) < np.median(far)


def test_what_a_slot_held_before_changes_no_bit_even_if_it_is_no_number(make_checkpoint, dtype):
    """Prompts of odd and even lengths begin anywhere in a block of the cache."""
    engine = make_engine(make_checkpoint("qwen3", **SHAPE), dtype=dtype, max_batch=4)
    before = engine.generate(requests(8))
    engine.forget_prompts()
    for cache in (*engine.model.buffers.keys, *engine.model.buffers.values):
        cache.fill_(torch.nan)
    after = engine.generate(requests(8))
    assert [(one.output_ids, one.logprobs) for (one,) in after] == [(one.output_ids, one.logprobs) for (one,) in before]


@pytest.fixture
def no_library():
    """The kernel as it was never built."""
    kernel._library.cache_clear()
    yield
    kernel._library.cache_clear()


@pytest.fixture(scope="module")
def built_for_older_processors(tmp_path_factory):
    """A cache of libraries that one compilation of each kind fills."""
    return str(tmp_path_factory.mktemp("older"))


@pytest.fixture(params=["avx512", "avx2"])
def older_processor(request, monkeypatch, built_for_older_processors, no_library):
    """Without products of bfloat16; without vectors of 16."""
    monkeypatch.setenv("NANODAG_CACHE", built_for_older_processors)
    missing = ("-U__AVX512BF16__",) if request.param == "avx512" else ("-U__AVX512BF16__", "-U__AVX512F__")
    monkeypatch.setattr(c_library, "FLAGS", (*c_library.FLAGS, *missing))


def test_older_processors_compute_the_same_up_to_rounding(make_checkpoint, torch_engine, older_processor, dtype):
    folder = make_checkpoint("qwen3", **SHAPE)
    older, plain = make_engine(folder, dtype=dtype), torch_engine(folder, dtype="float32")
    assert older.model.kernel is not None
    differences = apart(samples_of(older), samples_of(plain))
    assert len(differences) > 100
    assert np.max(differences) < (1e-4 if dtype == "float32" else 0.5)
    assert np.mean(differences) < (1e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("head_dim", [16, 48])
def test_on_older_processors_rows_have_the_same_bits_too(make_checkpoint, older_processor, dtype, head_dim):
    check_rows(make_engine(make_checkpoint("qwen3", **SHAPE, head_dim=head_dim), dtype=dtype, max_batch=20))


@pytest.mark.parametrize("window", [1, 9, 16, 33])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_windows_are_those_of_torch_up_to_rounding(make_checkpoint, torch_engine, dtype, window):
    """Matrices that are so small are multiplied in float32: of bfloat16 the cache alone is rounded, by both."""
    folder = make_checkpoint("mistral", **SHAPE, sliding_window=window)
    compiled, plain = make_engine(folder, dtype=dtype), torch_engine(folder, dtype=dtype)
    assert compiled.model.kernel is not None
    differences = apart(samples_of(compiled), samples_of(plain))
    assert len(differences) > 100
    assert np.median(differences) < 1e-5
    assert np.max(differences) < (1e-4 if dtype == "float32" else 0.02)


def apart(samples, others):
    """Differences of the logprobs of samples' tokens, as far as both drew the same."""
    found = []
    for one, other in zip(samples, others, strict=True):
        for token, its, a, b in zip(one.output_ids, other.output_ids, one.logprobs, other.logprobs, strict=True):
            if token != its:
                break
            found.append(abs(a - b))
    return found


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 128])
def test_a_row_has_the_same_bits_among_any_number_of_rows(make_checkpoint, dtype, head_dim):
    check_rows(make_engine(make_checkpoint("qwen3", **SHAPE, head_dim=head_dim), dtype=dtype, max_batch=20))


def check_rows(engine):
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
def test_a_prompt_leaves_the_bits_that_decoding_it_token_by_token_leaves(make_checkpoint, dtype, head_dim, length):
    engine = make_engine(make_checkpoint("qwen2", **SHAPE, head_dim=head_dim), dtype=dtype, max_batch=3)
    decoder, table = engine.model, SlotTable(3, 256)
    steps, buffers = CompiledSteps(decoder.kernel, table), decoder.buffers
    prompts = [np.random.default_rng(seed).integers(0, 150, size=size) for seed, size in ((0, 5), (1, length))]
    decoder.prefill(prompts, [[2], [1]])
    table.active[0] = True
    for token in prompts[1]:
        table.tokens[0] = token
        steps.decode(1)
    for slots in (*buffers.keys, *buffers.values):
        assert slots[0].any() and torch.equal(slots[1], slots[0])
    assert torch.equal(buffers.prompt_hidden[1], buffers.hidden[0])


def drawing_from(engine, *, greedy, key):
    """The kernel's draw for a table with one row, which nothing was drawn for yet."""
    table = SlotTable(1, 4)
    table.active[:], table.greedy[:], table.keys[:], table.limits[:] = True, greedy, key, 4
    steps = CompiledSteps(engine.model.kernel, table)
    return table, lambda: engine.model.kernel.library.draw(*steps._references, 1)


def test_scores_that_are_not_finite_break_a_row_and_nothing_is_recorded_for_it(make_checkpoint):
    engine = make_engine(make_checkpoint("qwen3", **SHAPE), dtype="float32", max_batch=1)
    for greedy in (False, True):
        table, draw = drawing_from(engine, greedy=greedy, key=2)
        engine.model.kernel.logits.zero_()
        assert draw() == 0
        assert table.counts[0] == 1
        assert np.isfinite(table.logprobs[0, 0])
        engine.model.kernel.logits[0, 5] = float("nan")
        assert draw() == 1
        assert table.counts[0] == 1


def test_a_token_without_probability_is_never_drawn(make_checkpoint):
    """The sum of a block is rounded: a number that falls beyond what its elements add up to must not take the next."""
    engine = make_engine(make_checkpoint("qwen3", **SHAPE), dtype="float32", max_batch=1)
    scores, possible = engine.model.kernel.logits, [130, 131, 149]
    table, draw = drawing_from(engine, greedy=False, key=KEY_OF_THE_LARGEST)
    for small in np.linspace(-18.0, -0.1, 400):
        scores.fill_(-torch.inf)
        scores[0, possible] = torch.tensor([0.0, small, small], dtype=torch.float32)
        table.counts[0] = 0
        draw()
        assert table.tokens[0] in possible


@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(40, 80), (64, 60)])
def test_other_shapes_are_left_to_torch(make_checkpoint, hidden_size, intermediate_size):
    folder = make_checkpoint("qwen3", hidden_size=hidden_size, intermediate_size=intermediate_size)
    assert make_engine(folder).model.kernel is None


def test_a_score_that_is_not_a_number_stays_so_through_bfloat16(make_checkpoint, monkeypatch):
    """Rounded as an integer, this NaN would become zero, and the row a token."""
    monkeypatch.setattr(weights, "MIN_BFLOAT16_ELEMENTS", 0)
    engine = make_engine(make_checkpoint("qwen3", **SHAPE), dtype="bfloat16", max_batch=1)
    largest_nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    engine.model.buffers.hidden.fill_(largest_nan)
    assert CompiledSteps(engine.model.kernel, SlotTable(1, 4)).score(1)[:, :150].isnan().all()


def test_without_a_compiler_the_sampler_says_what_to_install(make_checkpoint, monkeypatch, no_library):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(MissingTool, match="There is no C compiler cc"):
        make_engine(make_checkpoint("qwen3", **SHAPE), dtype="float32")


def test_a_compiler_that_fails_is_told_and_leaves_nothing_behind(make_checkpoint, tmp_path, monkeypatch, no_library):
    monkeypatch.setenv("NANODAG_CACHE", str(tmp_path))
    monkeypatch.setattr(c_library, "FLAGS", ("-no-such-flag",))
    with pytest.raises(MissingTool, match="no-such-flag"):
        make_engine(make_checkpoint("qwen3", **SHAPE), dtype="float32")
    assert list(tmp_path.iterdir()) == []
