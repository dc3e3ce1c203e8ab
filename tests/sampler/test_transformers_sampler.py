"""Sampling of models that transformers' classes compute, against those classes without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.sampler.engine import Engine
from tests.model.model_types import TYPES, make_tiny, taken_by_transformers

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = [[5, 9, 11, 40, 7, 8, 9, 10, 61, 62, 63, 64, 3], [17, 4, 90], [33] * 21]


@pytest.fixture(scope="module", params=list(TYPES))
def pair(request: Any, tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make_tiny(request.param, folder)
    taken_by_transformers(folder)
    return folder, theirs


def _engine(folder: Path, *, deterministic: bool = False) -> Engine:
    torch.set_num_threads(1)
    sizes = {"max_batch": 4, "context_length": 64, "deterministic": deterministic}
    return Engine(EngineSettings(engine="embedded", model=folder, dtype="float32", **sizes))


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
