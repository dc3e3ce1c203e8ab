"""Sampling of models that transformers' classes compute, against those classes without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanodag.errors import BadRequest
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from tests.model.model_types import TYPES, make_tiny, taken_by_transformers
from tests.sampler.reference import WholeEngine

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = [[5, 9, 11, 40, 7, 8, 9, 10, 61, 62, 63, 64, 3], [17, 4, 90], [33] * 21]


QUICK = ("gemma2", "qwen3_moe", "gpt_oss", "falcon_h1", "llama4_text")


ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TYPES]


@pytest.fixture(scope="module", params=ALL)
def pair(request: Any, tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make_tiny(request.param, folder)
    taken_by_transformers(folder)
    return folder, theirs


def _engine(folder: Path, *, deterministic: bool = False) -> WholeEngine:
    torch.set_num_threads(1)
    sizes = {"max_batch": 4, "context_length": 64, "deterministic": deterministic}
    return WholeEngine(EngineSettings(engine="embedded", model=folder, dtype="float32", **sizes))


def _greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Without a cache, the whole text again for each token."""
    ids, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            scores = model(input_ids=torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return ids[len(prompt) :], logprobs


def test_greedy_tokens_and_their_logprobs_are_those_of_the_class_alone(pair: Any) -> None:
    folder, theirs = pair
    lengths = (12, 20, 6)  # the first of four slots is free for another while others run
    params = [SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True) for n in (*lengths, *lengths)]
    requests = [Request(input_ids=p, params=of) for p, of in zip(PROMPTS * 2, params, strict=True)]
    for completions, prompt, length in zip(_engine(folder).generate(requests), PROMPTS * 2, lengths * 2, strict=True):
        tokens, logprobs = _greedy(theirs, prompt, length)
        assert completions[0].output_ids == tokens
        assert completions[0].logprobs == pytest.approx(logprobs, abs=1e-5)


def test_deterministic_samples_depend_on_no_other(pair: Any) -> None:
    folder, _ = pair
    requests = [
        Request(input_ids=prompt, params=SamplingParams(n=2, max_new_tokens=8 + n, sampling_seed=n, ignore_eos=True))
        for n, prompt in enumerate(PROMPTS)
    ]
    together = _engine(folder, deterministic=True).generate(requests)
    alone = [_engine(folder, deterministic=True).generate([request])[0] for request in requests]
    for ones, others in zip(together, alone, strict=True):
        for one, other in zip(ones, others, strict=True):
            assert (one.output_ids, one.logprobs) == (other.output_ids, other.logprobs)


def test_a_prompt_is_scored(pair: Any) -> None:
    folder, theirs = pair
    request = Request(
        input_ids=PROMPTS[0], params=SamplingParams(max_new_tokens=0), score_prompt=True, return_logprob=True
    )
    ids = torch.tensor(PROMPTS[0])
    with torch.no_grad():
        expected = theirs(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    (completion,) = _engine(folder).generate([request])[0]
    assert completion.prompt_logprobs[1:] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "llama4_text", "falcon_h1"])
def test_columns_that_no_sample_needs_are_let_go(tmp_path: Path, name: str) -> None:
    theirs = make_tiny(name, tmp_path)
    taken_by_transformers(tmp_path)
    engine, lengths = _engine(tmp_path), (20, 3, 9, 14, 5, 17, 4, 11, 6, 8)
    prompts = [[(3 + 7 * n + 5 * place) % 90 + 3 for place in range(2 + 5 * (n % 4))] for n in range(len(lengths))]
    params = [SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True) for n in lengths]
    found = engine.generate([Request(input_ids=p, params=of) for p, of in zip(prompts, params, strict=True)])
    assert engine.model._batches[0].columns <= 17 + 20  # of the longest that ran; all together have 97
    for completions, prompt, length in zip(found, prompts, lengths, strict=True):
        tokens, logprobs = _greedy(theirs, prompt, length)
        assert completions[0].output_ids == tokens
        assert completions[0].logprobs == pytest.approx(logprobs, abs=1e-5)


def test_new_weights_come_by_tensors_after_the_old_ones_were_released(tmp_path: Path) -> None:
    theirs = make_tiny("deepseek_v3", tmp_path / "first")
    other = make_tiny("deepseek_v3", tmp_path / "other", seed=1)
    for folder in ("first", "other"):
        taken_by_transformers(tmp_path / folder)
    engine = _engine(tmp_path / "first")
    engine.release_memory(["weights"])
    engine.resume_memory(["weights"])
    builder = engine.builder("a test")
    builder.add(dict(other.named_parameters()))
    engine.update_weights(builder.whole(), tmp_path / "other", "1")
    params = SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True)
    (completion,) = engine.generate([Request(input_ids=PROMPTS[0], params=params)])[0]
    theirs.load_state_dict(dict(other.named_parameters()), strict=False)
    assert completion.output_ids == _greedy(theirs, PROMPTS[0], 5)[0]


def test_buffers_that_are_saved_come_with_a_folder(tmp_path: Path) -> None:
    for number, folder in enumerate(("first", "other")):
        model = make_tiny("deepseek_v3", tmp_path / folder)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.linspace(-2.0, 2.0, len(buffer)) * number)
        model.save_pretrained(tmp_path / folder)
        taken_by_transformers(tmp_path / folder)
    engine = _engine(tmp_path / "first")
    engine.update_weights(engine.load(tmp_path / "other"), tmp_path / "other", "1")
    params = SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True)
    (completion,) = engine.generate([Request(input_ids=PROMPTS[0], params=params)])[0]
    assert completion.output_ids == _greedy(model, PROMPTS[0], 5)[0]


def test_a_class_whose_cache_is_not_known_is_refused_at_once(tmp_path: Path) -> None:
    make_tiny("minimax", tmp_path, num_local_experts=2, num_experts_per_tok=1)
    taken_by_transformers(tmp_path)
    with pytest.raises(BadRequest, match="cannot be sampled over its cache"):
        _engine(tmp_path)


def test_a_model_of_states_alone_is_sampled_beside_longer_ones(tmp_path: Path) -> None:
    theirs = make_tiny("mamba", tmp_path, state_size=8, num_heads=None, head_dim=None)
    taken_by_transformers(tmp_path)
    requests = [Request(input_ids=p, params=SamplingParams(temperature=0.0, max_new_tokens=6)) for p in PROMPTS]
    for completions, prompt in zip(_engine(tmp_path).generate(requests), PROMPTS, strict=True):
        tokens, logprobs = _greedy(theirs, prompt, 6)
        told = len(completions[0].logprobs)
        assert told and completions[0].output_ids == tokens[:told]
        assert completions[0].logprobs == pytest.approx(logprobs[:told], abs=1e-5)
