"""Vision-language models behind the interface of our decoder, against transformers' classes alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanodag.errors import BadRequest
from nanodag.host.images import FOLDER, IMAGE_TOKENS, digests_in
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.model.attention import document_attention
from nanodag.model.folder import load
from nanodag.tokenizer.chat import load_renderer
from nanodag.train.packing import conversation_piece
from tests.model.vision_models import KINDS, conversation, make_vision, seen
from tests.sampler.reference import WholeEngine

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=KINDS)
def pair(request: Any, tmp_path_factory: Any) -> Any:
    """A tiny model's folder, and transformers' own; pictures are kept in a folder of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("images")))
        folder = tmp_path_factory.mktemp(request.param)
        yield folder, make_vision(request.param, folder)


def _pieces(folder: Path) -> list[Any]:
    two = conversation(1)["messages"][0]["content"] + conversation(2)["messages"][0]["content"]
    of_two = [{"role": "user", "content": two}, {"role": "assistant", "content": "12"}]
    without = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    conversations = [conversation(0)["messages"], without, of_two]
    return [conversation_piece(*rendered) for rendered in load_renderer(folder).render_batch(conversations)]


def _row(pieces: list[Any]) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    ids = torch.from_numpy(np.concatenate([piece.input_ids for piece in pieces]).astype(np.int64))[None]
    labels = torch.from_numpy(np.concatenate([piece.labels for piece in pieces]).astype(np.int64))[None]
    return ids, labels, np.repeat(np.arange(len(pieces)), [piece.num_positions for piece in pieces])[None]


def test_packed_conversations_with_pictures_have_the_logits_of_each_alone(pair: Any) -> None:
    folder, theirs = pair
    pieces, ours = _pieces(folder), load(folder)
    ids, _, numbers = _row(pieces)
    with torch.no_grad():
        found = ours(ids, ids, attend=document_attention(numbers), want="hidden") @ ours.lm_head.weight.T
        expected = [theirs(**seen(ids[:, numbers[0] == n], theirs, folder)).logits[0] for n in range(len(pieces))]
    assert [len(digests_in(piece.input_ids)) for piece in pieces] == [1, 0, 2]
    assert (found[0].log_softmax(-1) - torch.cat(expected).log_softmax(-1)).abs().max() <= 1e-5


def test_an_sft_step_on_pictures_is_that_of_a_plain_loop(pair: Any) -> None:
    folder, theirs = pair
    pieces, ours = _pieces(folder), load(folder)
    ids, labels, numbers = _row(pieces)
    ours(ids, ids, targets=labels, attend=document_attention(numbers)).backward()
    theirs.zero_grad()
    logits = torch.cat([theirs(**seen(ids[:, numbers[0] == n], theirs, folder)).logits[0] for n in range(len(pieces))])
    torch.nn.functional.cross_entropy(logits, labels[0], reduction="sum").backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[name]).abs().max() <= 1e-6 * largest, name
    assert any(gradients[name].abs().max() > 0 for name in gradients if "visual" in name)


def test_a_row_without_pictures_has_a_gradient_of_0_for_the_vision_layers(pair: Any) -> None:
    folder, _ = pair
    ours = load(folder)
    ids = torch.tensor([[5, 9, 40, 3]])
    ours(ids, ids, targets=ids, attend=document_attention(np.zeros((1, 4), int))).backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters() if "visual" in name}
    assert gradients and all(gradient is not None and not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("deterministic", [True, False])
def test_greedy_answers_to_pictures_are_those_of_the_class_without_a_cache(pair: Any, deterministic: bool) -> None:
    folder, theirs = pair
    renderer = load_renderer(folder)
    prompts = [renderer.prompt(conversation(n)["messages"][:1]) for n in (0, 1)]
    prompts.append(renderer.prompt([{"role": "user", "content": "1 + 1?"}]))
    sizes = {"max_batch": 4, "context_length": 96, "deterministic": deterministic}
    engine = WholeEngine(EngineSettings(engine="embedded", model=folder, dtype="float32", **sizes))
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    for prompt, found in zip(
        prompts, engine.generate([Request(input_ids=p, params=params) for p in prompts]), strict=True
    ):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(6):
                token = theirs(**seen(ids, theirs, folder)).logits[0, -1].argmax()
                ids = torch.cat([ids, token[None, None]], dim=1)
        assert found[0].output_ids == ids[0, len(prompt) :].tolist()


def test_the_class_s_own_placeholder_is_a_word_where_a_model_says_it(pair: Any) -> None:
    folder, _ = pair
    ours = load(folder)
    prompt = load_renderer(folder).prompt(conversation(0)["messages"][:1])
    place = ours._loaded.whole.config.image_token_id
    ids = torch.tensor([[*prompt, place, 5]])
    with torch.no_grad():
        found = ours(ids, ids, attend=document_attention(np.zeros(ids.shape, int)), want="hidden")
    assert found.isfinite().all()
    engine = WholeEngine(
        EngineSettings(engine="embedded", model=folder, dtype="float32", max_batch=2, context_length=96)
    )
    engine.generate([Request(input_ids=ids[0].tolist(), params=SamplingParams(max_new_tokens=2))])
    with pytest.raises(BadRequest, match="a prompt with images has no log-probabilities"):
        scored = {"return_logprob": True, "score_prompt": True}
        engine.generate([Request(input_ids=prompt, params=SamplingParams(max_new_tokens=2), **scored)])


def test_ids_that_spell_no_kept_picture_are_refused_before_anything_runs(pair: Any) -> None:
    folder, _ = pair
    engine = WholeEngine(
        EngineSettings(engine="embedded", model=folder, dtype="float32", max_batch=2, context_length=96)
    )
    unknown = [IMAGE_TOKENS + word for word in (1, 2, 3, 4)] * 4
    for ids, said in ((unknown, "is not in"), (unknown[:3], "spell no image"), ([300], "outside the vocabulary")):
        with pytest.raises(BadRequest, match=said):
            engine.generate([Request(input_ids=[5, *ids, 6], params=SamplingParams(max_new_tokens=2))])
    prompt = load_renderer(folder).prompt(conversation(0)["messages"][:1])
    (_, end, _), *_ = digests_in(prompt)
    with pytest.raises(BadRequest, match="takes 16 tokens, and 12 stand for it"):
        engine.generate([Request(input_ids=prompt[: end - 4] + prompt[end:], params=SamplingParams(max_new_tokens=2))])


def test_a_model_of_text_refuses_pictures(tmp_path: Path) -> None:
    from tests.model.model_types import make_tiny, taken_by_transformers

    make_tiny("gemma2", tmp_path)
    taken_by_transformers(tmp_path)
    engine = WholeEngine(
        EngineSettings(engine="embedded", model=tmp_path, dtype="float32", max_batch=2, context_length=64)
    )
    with pytest.raises(BadRequest, match="outside the vocabulary"):
        engine.generate([Request(input_ids=[5, IMAGE_TOKENS + 1], params=SamplingParams(max_new_tokens=2))])
