"""Continuous batching: slots, stops, cached prompts, weights that change in flight, refusals."""

import contextlib
import json
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache

import nanodag.sampler.slots
from nanodag.errors import BadRequest, ConfigError, SamplerError
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.model.architecture import check_sglang
from tests.sampler.reference import make_engine, token_versions

EOS = 7
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def request(prompt=(1, 2, 3), rid=None, **params):
    return Request(input_ids=list(prompt), params=SamplingParams(**{"max_new_tokens": 20, **params}), rid=rid)


def submit(engine, wanted):
    """Queue a request; returns the list that its completions will be put into."""
    found = [None] * wanted.params.n
    engine.submit(wanted, found.__setitem__)
    return found


def run(engine):
    while engine.has_work:
        engine.step()


def count_prefills(engine):
    """Records what the engine's model runs of prompts from here on."""
    seen = []
    original = engine.model.prefill

    def prefill(prompts, slots, starts):
        seen.extend(prompt[start:].tolist() for prompt, start in zip(prompts, starts, strict=True))
        original(prompts, slots, starts)

    engine.model.prefill = prefill
    return seen


@pytest.fixture(scope="module")
def folder(make_checkpoint):
    return make_checkpoint("qwen3")


@pytest.fixture
def engine(folder):
    return make_engine(folder, max_batch=8)


def test_a_prompt_is_run_once_for_all_its_samples_even_if_they_wait_for_slots(engine):
    prompts = count_prefills(engine)
    (completions,) = engine.generate([request(n=30)])
    assert prompts == [[1, 2, 3]]
    assert len(completions) == 30
    assert [completion.num_cached_tokens for completion in completions] == [0] + [3] * 29


@pytest.mark.parametrize(("silence_s", "told"), [(1e9, [1, 8]), (0.0, [1, 2, 3, 4, 5, 6, 7, 8])])
def test_streams_take_no_more_than_their_share_of_the_engine_but_for_a_limit_of_silence(
    folder, monkeypatch, silence_s, told
):
    monkeypatch.setattr(nanodag.sampler.slots, "REPORT_CPU_S", 1e9)
    monkeypatch.setattr(nanodag.sampler.slots, "MAX_SILENCE_S", silence_s)
    engine, counts = make_engine(folder, max_batch=2, stream_every_s=1e-9), []
    engine.submit(
        request(max_new_tokens=8, ignore_eos=True), lambda _, now: counts.append(len(now.output_ids)), stream=True
    )
    run(engine)
    assert counts == told


def test_a_prompt_that_was_overwritten_is_run_again(engine):
    prompts = count_prefills(engine)
    engine.generate([request((1, 2))])
    engine.generate([request((token,)) for token in range(10, 30)])
    engine.generate([request((1, 2))])
    assert prompts.count([1, 2]) == 2


def test_a_prompt_whose_row_another_sample_moved_into_is_run_again(engine, folder):
    first = submit(engine, request((6, 6, 6), max_new_tokens=2, ignore_eos=True))
    submit(engine, request((1, 2), max_new_tokens=60, ignore_eos=True))
    while first[0] is None:
        engine.step()
    assert engine.table.active_rows.tolist() == [0]  # the second moved to where the first was
    again = submit(engine, request((6, 6, 6), sampling_seed=1, ignore_eos=True))
    run(engine)
    (fresh,) = make_engine(folder, max_batch=8).generate([request((6, 6, 6), sampling_seed=1, ignore_eos=True)])[0]
    assert again[0].output_ids == fresh.output_ids
    np.testing.assert_allclose(again[0].logprobs, fresh.logprobs, atol=1e-5)


def test_the_same_seed_gives_the_same_tokens_and_no_seed_gives_others(engine):
    one, two = (engine.generate([request(sampling_seed=3, ignore_eos=True)])[0][0].output_ids for _ in range(2))
    three, four = (engine.generate([request(ignore_eos=True)])[0][0].output_ids for _ in range(2))
    assert one == two
    assert len({tuple(ids) for ids in (one, three, four)}) == 3


def test_the_end_of_sequence_token_ends_a_sample_unless_it_is_ignored(engine):
    params = {"n": 40, "max_new_tokens": 200, "sampling_seed": 0}
    ended, ignored = engine.generate([request(**params), request(**params, ignore_eos=True)])
    stopped = [completion for completion in ended if completion.finish_reason.type == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.output_ids.index(EOS) == len(completion.output_ids) - 1
        assert completion.finish_reason.matched == EOS
    assert {len(completion.output_ids) for completion in ignored} == {200}
    assert any(EOS in completion.output_ids for completion in ignored)


def test_a_stop_token_at_the_last_place_counts_as_a_stop(engine):
    (free,) = engine.generate([request(sampling_seed=1, max_new_tokens=4, ignore_eos=True)])[0]
    (last,) = engine.generate([request(sampling_seed=1, max_new_tokens=4, stop_token_ids=[free.output_ids[-1]])])[0]
    assert last.finish_reason.type == "stop"


def test_without_a_limit_a_sample_fills_the_context(engine):
    (completion,) = engine.generate([request([5] * 200, max_new_tokens=None, ignore_eos=True)])[0]
    assert len(completion.output_ids) == 256 - 200
    assert completion.finish_reason.type == "length"


def test_samples_that_end_make_room_and_steps_shrink(folder):
    engine = make_engine(folder, max_batch=64)
    engine.steps.decode = decode = Mock(wraps=engine.steps.decode)
    long = submit(engine, request((4, 4), max_new_tokens=100, ignore_eos=True, sampling_seed=5))
    engine.generate([request((index,), max_new_tokens=5, ignore_eos=True) for index in range(63)])
    widths = [call.args[0] for call in decode.call_args_list]
    assert max(widths) == 64
    assert widths[-1] == 1
    (alone,) = make_engine(folder).generate([request((4, 4), max_new_tokens=100, ignore_eos=True, sampling_seed=5)])[0]
    assert long[0].output_ids == alone.output_ids
    np.testing.assert_allclose(long[0].logprobs, alone.logprobs, atol=1e-5)


def test_aborting_returns_what_there_is(engine):
    running, other = submit(engine, request(n=2, rid="a", ignore_eos=True)), submit(engine, request(rid="b"))
    waiting = submit(engine, request(n=9, rid="c"))
    for _ in range(4):
        engine.step()
    assert engine.abort(lambda running: running.rid in ("a", "c"), "enough") == 11
    assert [len(completion.output_ids) for completion in running] == [4, 4]
    assert {completion.finish_reason.type for completion in [*running, *waiting]} == {"abort"}
    assert len(waiting[-1].output_ids) == 0
    run(engine)
    assert other[0].finish_reason.type in ("stop", "length")


# ---- weights


def stale_cache_logprobs(old_folder, new_folder, prompt, output_ids, swap):
    """Logprobs of the tokens from ``swap`` on, by the new weights over keys and values that the old ones made."""
    old, new = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (old_folder, new_folder))
    cached = prompt + output_ids[: swap - 1]  # the last token before the swap is not in the cache yet
    cache = DynamicCache()
    with torch.no_grad():
        old(torch.tensor([cached]), past_key_values=cache)
        rest = torch.tensor([output_ids[swap - 1 : -1]])
        logprobs = torch.log_softmax(new(rest, past_key_values=cache).logits[0].double(), -1)
    return logprobs.gather(1, torch.tensor(output_ids[swap:])[:, None])[:, 0].numpy()


def test_weights_that_change_in_flight_split_the_versions_at_the_very_token(engine, folder, make_checkpoint):
    other = make_checkpoint("qwen3", seed=1)
    found = submit(engine, request(ignore_eos=True))
    for _ in range(8):
        engine.step()
    engine.update_weights(engine.load(other), other, "41")
    run(engine)
    (completion,) = found
    assert token_versions(completion) == ["default"] * 8 + ["41"] * 12
    assert completion.weight_version == "41"
    expected = stale_cache_logprobs(folder, other, [1, 2, 3], completion.output_ids, 8)
    np.testing.assert_allclose(completion.logprobs[8:], expected, atol=1e-4)


def test_retracted_samples_are_first_in_line_in_their_order(engine):
    submit(engine, request(n=20, ignore_eos=True))
    engine.step()
    engine.retract()
    assert [sample.index for sample in engine.waiting] == list(range(20))


def test_new_weights_do_not_use_a_prompt_that_old_ones_cached(engine, folder, make_checkpoint):
    other = make_checkpoint("qwen3", seed=1)
    engine.generate([request()])
    engine.update_weights(engine.load(other), other, "1")
    (after,) = engine.generate([request(sampling_seed=0, ignore_eos=True)])[0]
    (fresh,) = make_engine(other).generate([request(sampling_seed=0, ignore_eos=True)])[0]
    assert after.output_ids == fresh.output_ids
    np.testing.assert_allclose(after.logprobs, fresh.logprobs, atol=1e-5)


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"tie_word_embeddings": True}, {"num_hidden_layers": 3}])
def test_weights_of_another_shape_are_refused_by_name(engine, make_checkpoint, change):
    with pytest.raises(BadRequest, match=next(iter(change)).replace("tie_word_embeddings", "tied").split("_")[-1]):
        engine.load(make_checkpoint("qwen3", **change))


NORM = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state.pop(NORM), "no tensor 'model.layers.1.mlp.down_proj.weight'"),
        (lambda state: state.update({NORM: state[NORM][:, 1:].contiguous()}), "has shape"),
        (lambda state: state.update({"model.layers.0.extra": torch.ones(2)}), "no place for"),
        (lambda state: state[NORM][3].fill_(torch.nan), "NaN"),
        (lambda state: state[NORM][3, 3].fill_(-torch.inf), "infinity"),
        (None, "cannot be read"),  # cut short
    ],
)
def test_broken_weights_are_refused_with_the_tensor(make_model, tmp_path, change, reason):
    model = make_model("qwen3")
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    if change is None:
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        state = dict(model.state_dict())
        change(state)
        save_file(state, weights)
    with pytest.raises(BadRequest, match=reason):
        make_engine(tmp_path)


def test_scores_that_are_not_finite_end_the_request_and_leave_no_trace(engine, folder):
    head = engine.model.weights.head.clone()
    engine.model.weights.layers[0].down.fill_(torch.nan)
    with pytest.raises(SamplerError, match="not finite"):
        engine.generate([request([5] * 30, n=8)])  # longer than what comes next, which must not see the rest of it
    engine.update_weights(engine.load(folder), folder, "1")
    assert torch.equal(head, engine.model.weights.head)
    (completion,) = engine.generate([request(sampling_seed=0, ignore_eos=True)])[0]
    (fresh,) = make_engine(folder, max_batch=8).generate([request(sampling_seed=0, ignore_eos=True)])[0]
    assert completion.output_ids == fresh.output_ids


# ---- refusals


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (request([3, 150]), "token id 150 is outside the vocabulary of 150"),
        (request([1] * 250), "250 tokens and 20 new ones do not fit the context of 256"),
        (request([1] * 256, max_new_tokens=None), "do not fit"),
        (request(stop=("x",)), "tokenizer"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_any_runs(engine, wanted, reason):
    with pytest.raises(BadRequest, match=reason):
        engine.generate([request(), wanted])
    assert not engine.has_work


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window None for layers"),
        ({"layer_types": ["full_attention", "chunked_attention"], "use_sliding_window": True}, "chunked_attention"),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, "is 0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "mscale of a yarn rope"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, "truncate false"),
        ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, "no frequencies follow"),
        ({"rope_parameters": {**YARN, "factor": 0}}, "no frequencies follow"),
        ({"model_type": "smollm3", "no_rope_layers": "10"}, "no_rope_layers"),
        ({"model_type": "smollm3", "num_hidden_layers": 10**9}, "at most 10000"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; at most 10000"),
    ],
)
def test_what_is_not_built_is_refused_by_name(make_model, tmp_path, change, reason):
    make_model("qwen3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(BadRequest, match=reason):
        make_engine(tmp_path)


def test_the_older_spelling_of_rope_theta_is_read(make_model, tmp_path):
    model = make_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    model.save_pretrained(tmp_path / "new")
    model.save_pretrained(tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "old" / "config.json").write_text(json.dumps({**config, "rope_theta": 77.0, "rope_scaling": None}))
    wanted = request(sampling_seed=1)
    old, new = (make_engine(tmp_path / name).generate([wanted])[0][0] for name in ("old", "new"))
    assert old.logprobs == new.logprobs


def test_the_cache_is_bounded_by_its_bytes(folder):
    # 2 layers x 2 key/value heads x 16 dimensions x (key and value) x 4 bytes = 512 bytes a token; 256 tokens
    slot_bytes = 512 * 256
    assert make_engine(folder, max_batch=64, cache_bytes=10 * slot_bytes).num_slots == 10
    assert make_engine(folder, max_batch=4, cache_bytes=10 * slot_bytes).num_slots == 4
    assert make_engine(folder, max_batch=64, context_length=64, cache_bytes=10 * slot_bytes).num_slots == 40


@pytest.mark.parametrize(
    "option", [{"dtype": "int8"}, {"max_batch": 0}, {"context_length": 257}, {"cache_bytes": 512 * 256 - 1}], ids=str
)
def test_options_that_make_no_sense_are_refused_by_name(folder, option):
    with pytest.raises(BadRequest, match=next(iter(option)).partition("_")[0]):
        make_engine(folder, **option)


# ---- text


def test_a_stop_string_ends_a_sample_and_is_trimmed_from_its_text(text_folder):
    engine = make_engine(text_folder)
    (free,) = engine.generate([request(sampling_seed=2, ignore_eos=True)])[0]
    words = free.text.split()
    assert words == [f"w{token}" for token in free.output_ids]
    stop = f"{words[4]} {words[5]}"
    for no_stop_trim, expected in ((False, " ".join(words[:4]) + " "), (True, " ".join(words[:6]))):
        wanted = request(sampling_seed=2, ignore_eos=True, stop=("w999", stop), no_stop_trim=no_stop_trim)
        (completion,) = engine.generate([wanted])[0]
        assert completion.output_ids == free.output_ids[:6]
        assert completion.text == expected
        assert completion.finish_reason.matched == stop


def test_a_stop_token_is_trimmed_from_the_text_but_not_from_the_ids(text_folder):
    engine = make_engine(text_folder)
    (free,) = engine.generate([request(sampling_seed=2, ignore_eos=True)])[0]
    stop = free.output_ids[3]
    (completion,) = engine.generate([request(sampling_seed=2, stop_token_ids=[stop])])[0]
    assert completion.output_ids[-1] == stop
    assert completion.text == " ".join(f"w{token}" for token in completion.output_ids[:-1])


WINDOWED = {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 8, "max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("config", "context", "error", "reason"),
    [
        (WINDOWED, 9, ConfigError, r"^--engine: .* window of 8 tokens, and contexts have up to 9"),
        (WINDOWED, None, ConfigError, "contexts have up to 16"),
        (WINDOWED | {"num_hidden_layers": 10**12}, 8, BadRequest, "at most 10000"),
        (WINDOWED | {"sliding_window": "wide"}, 8, BadRequest, "does not describe a model"),
        (WINDOWED, 8, None, ""),
        (WINDOWED | {"model_type": "gemma3"}, None, None, ""),
        (WINDOWED | {"model_type": "smollm3"}, 8, ConfigError, "^--engine: sglang has no class"),
    ],
)
def test_sglang_is_refused_where_it_would_not_compute_the_model(tmp_path, config, context, error, reason):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=reason) if error else contextlib.nullcontext():
        check_sglang(tmp_path, context, "--engine")
