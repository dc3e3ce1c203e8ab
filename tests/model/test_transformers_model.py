"""Models that transformers' classes compute, behind the interface of our decoder, against those classes alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanodag.errors import BadRequest, ConfigError
from nanodag.model.architecture import read_checkpoint
from nanodag.model.attention import Packed, document_attention, sequences_of_group
from nanodag.model.folder import load, write_like
from nanodag.model.headers import tensor_shapes
from nanodag.model.transformers_class import check_known
from nanodag.model.transformers_model import TransformersModel
from tests.model.model_types import TYPES, make_tiny, taken_by_transformers

pytestmark = pytest.mark.filterwarnings("ignore")
DOCUMENTS = np.array([[0] * 20 + [1] * 13 + [2] * 7, [3] * 3 + [4] * 37])


@pytest.fixture(scope="module", params=list(TYPES))
def pair(request: Any, tmp_path_factory: Any) -> tuple[Path, Any, TransformersModel]:
    """A tiny model of each type: its folder, transformers' own, ours."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make_tiny(request.param, folder)
    taken_by_transformers(folder)
    ours = load(folder)
    assert isinstance(ours, TransformersModel)
    return folder, theirs, ours


def _logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0].float().log_softmax(-1)


def _rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 96, DOCUMENTS.shape, generator=generator)
    targets = torch.full_like(ids, -100)
    for row, numbers in enumerate(DOCUMENTS):
        same = torch.from_numpy(numbers[:-1] == numbers[1:])
        targets[row, :-1] = torch.where(same, ids[row, 1:], -100)
    return ids, targets


def test_packed_documents_have_the_logprobs_of_each_alone(pair: Any) -> None:
    _, theirs, ours = pair
    ids, targets = _rows()
    with torch.no_grad():
        logprobs, _ = ours(ids, ids, targets=targets, want="logprobs", attend=document_attention(DOCUMENTS))
    expected = []
    for row, numbers in enumerate(DOCUMENTS):
        for number in dict.fromkeys(numbers.tolist()):
            text = ids[row][torch.from_numpy(numbers == number)]
            expected.append(_logprobs(theirs, text)[:-1].gather(1, text[1:, None])[:, 0])
    assert (logprobs - torch.cat(expected)).abs().max() <= 1e-5


def test_responses_have_the_logprobs_of_each_behind_its_prompt(pair: Any) -> None:
    _, theirs, ours = pair
    ids, _ = _rows()
    row = ids[1]
    attend = Packed(sequences_of_group(np.array([[0, 12]]), np.array([[12, 9, 0], [21, 15, 0]])))
    with torch.no_grad():
        hidden = ours(row[None, :36], row[None, :36], attend=attend, want="hidden")
        logits = ours.lm_head(hidden, None, "logits", 1.0)[0].float().log_softmax(-1)
    for begin, end in ((12, 21), (21, 36)):
        expected = _logprobs(theirs, torch.cat([row[:12], row[begin:end]]))
        assert (logits[begin:end] - expected[12:]).abs().max() <= 1e-5
        assert (logits[:12] - expected[:12]).abs().max() <= 1e-5


def test_a_step_is_that_of_a_plain_loop(pair: Any) -> None:
    _, theirs, ours = pair
    ids, targets = _rows()
    loss = ours(ids, ids, targets=targets, attend=document_attention(DOCUMENTS))
    names = [name for name, _ in ours.named_parameters()]
    gradients = torch.autograd.grad(loss, list(ours.parameters()), allow_unused=True)
    plain = torch.zeros(())
    for row, numbers in enumerate(DOCUMENTS):
        for number in dict.fromkeys(numbers.tolist()):
            text = ids[row][torch.from_numpy(numbers == number)]
            logits = theirs(input_ids=text[None]).logits[0].float()
            plain = plain + torch.nn.functional.cross_entropy(logits[:-1], text[1:], reduction="sum")
    parameters = dict(theirs.named_parameters())
    assert sorted(parameters) == sorted(names)
    expected = torch.autograd.grad(plain, [parameters[name] for name in names], allow_unused=True)
    assert abs(float(loss / plain) - 1) <= 1e-6
    for name, ours_g, theirs_g in zip(names, gradients, expected, strict=True):
        if theirs_g is not None and theirs_g.abs().max() > 1e-6:
            assert (ours_g - theirs_g).abs().max() <= 1e-4 * theirs_g.abs().max(), name


def test_what_is_written_is_what_transformers_and_we_read_again(pair: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, theirs, ours = pair
    changed = {name: (tensor + 0.01).detach() for name, tensor in ours.named_parameters()}
    write_like(folder, tmp_path / "new", ours.checkpoint(changed).items(), dtype=torch.float32)
    kept = theirs.state_dict()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32).state_dict()
    again = dict(load(tmp_path / "new").named_parameters())
    assert tensor_shapes(tmp_path / "new") == tensor_shapes(folder)
    for name, tensor in changed.items():
        assert torch.equal(read[name], tensor) and torch.equal(again[name], tensor)
    for name in set(kept) - set(changed) - {"lm_head.weight"}:  # what is not trained
        assert torch.equal(read[name], kept[name])


def test_a_cast_leaves_the_angles_of_positions_in_float32(pair: Any) -> None:
    folder, theirs, _ = pair
    ours = load(folder).bfloat16()
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert {name: b.dtype for name, b in ours.named_buffers()} == {n: b.dtype for n, b in theirs.named_buffers()}


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe", "falcon_h1"])
def test_activation_checkpointing_changes_no_gradient(tmp_path: Path, name: str) -> None:
    make_tiny(name, tmp_path)
    taken_by_transformers(tmp_path)
    ids, targets = _rows()
    gradients = []
    for is_checkpointed in (False, True):
        model = load(tmp_path, activation_checkpointing=is_checkpointed)
        loss = model(ids, ids, targets=targets, attend=document_attention(DOCUMENTS))
        gradients.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
        kept = sum(getattr(module, "gradient_checkpointing", False) and module.training for module in model.modules())
        assert kept == (4 if is_checkpointed else 0), "layers that compute their activations again"
    for one, other in zip(*gradients, strict=True):
        assert one is None or torch.allclose(one, other, atol=1e-6)


def test_questions_have_the_scores_of_our_own_decoder(tmp_path: Path) -> None:
    from nanodag.model.scoring import Question, score_questions

    make_tiny("llama", tmp_path)
    questions = [Question((5, 9, 11), ((4, 8), (7,), (4, 9, 9))), Question((60,) * 20, ((3, 3),))]
    own = score_questions([load(tmp_path)], questions, micro_batch_tokens=64, max_positions=128)
    taken_by_transformers(tmp_path)
    theirs = score_questions([load(tmp_path)], questions, micro_batch_tokens=64, max_positions=128)
    for ones, others in zip(own, theirs, strict=True):
        for one, other in zip(ones, others, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5) and one.is_greedy == other.is_greedy


def test_angles_that_follow_the_length_are_refused_or_kept_short(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    settings = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **factors}
    make_tiny("phi3", tmp_path / "long", rope_parameters=settings, original_max_position_embeddings=16)
    assert read_checkpoint(tmp_path / "long", "transformers").architecture.max_positions == 16
    make_tiny("llama", tmp_path / "dynamic", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(BadRequest, match="rope_type dynamic"):
        read_checkpoint(tmp_path / "dynamic", "transformers")


def test_a_type_that_our_decoder_does_not_know_is_refused_with_the_setting_that_takes_it(tmp_path: Path) -> None:
    make_tiny("gemma2", tmp_path)
    with pytest.raises(BadRequest, match=r"'gemma2'.*model_code: transformers"):
        read_checkpoint(tmp_path)


def test_sizes_of_every_type_are_known_without_torch(pair: Any) -> None:
    from nanodag.model.architecture import vocabulary_and_positions
    from nanodag.model.folder_size import size_of
    from nanodag.model.headers import head_parameters

    folder, theirs, ours = pair
    vocabulary, positions = vocabulary_and_positions(folder)
    assert vocabulary == 96 and positions in (128, 32_768)
    assert head_parameters(folder) == theirs.get_output_embeddings().weight.numel()
    total = sum(parameter.numel() for parameter in ours.parameters())
    assert size_of(folder, ours.architecture).total == pytest.approx(total, rel=0.15)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_implementation": "owner/kernel"}, "'owner/kernel', and none is run"),
        ({"num_attention_heads": 0}, "cannot read the model"),
        ({"rope_parameters": [1]}, "cannot read the model"),
        ({"model_type": "t5"}, "no causal model of type t5"),
    ],
)
def test_a_hostile_config_is_refused_at_the_import(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    make_tiny("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=words):
        check_known(tmp_path)


@pytest.mark.parametrize(
    ("size", "found"), [("num_hidden_layers", -1), ("num_hidden_layers", 10**7), ("vocab_size", -5)]
)
def test_impossible_sizes_are_refused_by_both_ways(tmp_path: Path, size: str, found: int) -> None:
    make_tiny("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), size: found}))
    for code in ("own", "transformers"):
        with pytest.raises(BadRequest, match=str(found)):
            read_checkpoint(tmp_path, code)


def test_adapters_beside_a_model_are_not_added_in_silence(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    taken_by_transformers(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/other", "peft_type": "LORA"}')
    with pytest.raises(ConfigError, match="name this folder as `adapter`"):
        load(tmp_path)
