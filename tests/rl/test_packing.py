"""Packed rows: who is where, who sees whom, and the same numbers as without packing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, SmolLM3Config

from nanodag.errors import ConfigError
from nanodag.model.folder import load
from nanodag.rl.rollouts.rollout import Rollout, Span, prompt_span
from nanodag.rl.trainer.policy import Policy, to_row
from nanodag.rl.trainer.rows import pack
from tests.rl.rollouts import RAGGED, rollout, sampled_span

CPU = torch.device("cpu")


SHAPE = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SHAPE |= {"initializer_range": 0.4, "tie_word_embeddings": False}
MODELS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "wide heads": Qwen3Config(**SHAPE, head_dim=16),
    "without positions": SmolLM3Config(**SHAPE, pad_token_id=0, no_rope_layer_interval=2),
    "window": MistralConfig(**SHAPE, sliding_window=3),
    "both": Qwen3Config(**SHAPE, head_dim=16, use_sliding_window=True, sliding_window=2, max_window_layers=1),
}


def model_of(kind: str, folder: Path):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(MODELS[kind]).eval()
    model.save_pretrained(folder)
    return model


def test_a_row_written_out_by_hand():
    (row,) = pack([RAGGED[0], RAGGED[2]], budget_tokens=100)
    #                         prompt     4, 5 of (4, 5, 6)   9 of (9, 10)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    assert row.prompts.tolist() == [[0, 3]]
    assert row.responses.tolist() == [[3, 2, 0], [5, 1, 0]]
    assert row.predictors.tolist() == [2, 3, 4, 2, 5]
    assert row.targets.tolist() == [4, 5, 6, 9, 10]
    assert row.sequence_ids.tolist() == [0, 0, 0, 1, 1]
    assert row.mask.all() and row.rollouts.tolist() == [0, 1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("budget", [7, 11, 100])
def test_every_response_is_trained_once_within_the_budget_and_ranks_get_the_same_number_of_rows(budget, num_ranks):
    ranks = [pack(RAGGED, budget_tokens=budget, num_ranks=num_ranks, rank=rank) for rank in range(num_ranks)]
    rows = [row for rank in ranks for row in rank]
    assert len(ranks) == num_ranks and len({len(rank) for rank in ranks}) == 1
    assert all(len(row.token_ids) <= budget for row in rows)
    places = [(row, place, index) for row in rows for place, index in enumerate(row.rollouts.tolist())]
    trained = [(index, row.targets[(row.sequence_ids == place) & row.mask].tolist()) for row, place, index in places]
    responses = [list(one.response_token_ids) for one in RAGGED]
    assert sorted(pair for pair in trained if pair[1]) == list(enumerate(responses))


def test_apart_each_response_has_a_prompt_of_its_own_that_counts():
    together, apart = (pack(RAGGED, budget_tokens=64, shares_prompts=shares) for shares in (True, False))
    assert sum(len(row.prompts) for row in together) < len(RAGGED) == sum(len(row.prompts) for row in apart)
    assert sum(len(row.targets) for row in together) == sum(len(row.targets) for row in apart)
    assert max(len(row.token_ids) for row in pack(RAGGED, budget_tokens=8, shares_prompts=False)) <= 8


def test_rows_of_two_ranks_are_of_like_size():
    many = [rollout(str(g), s, [1] * (5 + g), [2] * (3 + 7 * s)) for g in range(8) for s in range(4)]
    first, second = (pack(many, budget_tokens=120, num_ranks=2, rank=rank) for rank in (0, 1))
    for one, other in zip(first, second, strict=True):
        assert abs(len(one.token_ids) - len(other.token_ids)) <= 0.2 * len(one.token_ids)


def test_a_rollout_above_the_budget_is_refused_with_what_to_raise():
    with pytest.raises(ConfigError, match="Raise micro_batch_tokens to at least 6"):
        pack(RAGGED, budget_tokens=5)


def several_turns(group: str, sample: int, prompt: list[int], *turns: list[int]) -> Rollout:
    """turns: ids that were sampled, or -ids of a tool."""
    spans = [prompt_span(prompt)]
    for ids in turns:
        tool = Span(kind="tool", token_ids=tuple(-token for token in ids)) if ids[0] < 0 else None
        spans.append(tool or sampled_span(ids, [-0.5] * len(ids), version=0))
    return replace(rollout(group, sample, prompt, [1]), spans=tuple(spans))


TURNS = [
    several_turns("a", 0, [1, 2, 3], [4, 5], [-6, -7, -8], [9]),
    RAGGED[2],
    several_turns("a", 2, [1, 2, 3], [-10], [11, 12], [13], [-14]),
    several_turns("b", 0, [7], [15], [-16, -17], [18, 19], [-20, -21]),
]
MASKS = [[1, 1, 0, 0, 0, 1], [1, 1], [0, 1, 1, 1, 0], [1, 0, 0, 1, 1, 0, 0]]
WHOLE = [[1] * len(one.response_token_ids) for one in RAGGED]


@pytest.mark.parametrize(
    ("kind", "budget", "rollouts", "masks"),
    [*((kind, budget, RAGGED, WHOLE) for kind in MODELS for budget in (7, 100)), ("qwen3", 20, TURNS, MASKS)],
)
def test_packed_rollouts_equal_each_alone_in_value_and_gradient(kind, budget, rollouts, masks, tmp_path):
    model = model_of(kind, tmp_path)
    weights, plain = torch.rand(len(rollouts)) - 0.5, []
    for one, weight, mask in zip(rollouts, weights, masks, strict=True):  # through the model's own attention
        ids = torch.tensor([one.prompt_token_ids + one.response_token_ids])
        start = len(one.prompt_token_ids)
        logprobs = log_softmax(model(ids).logits[0, start - 1 : -1] / 0.8, dim=-1)
        plain.append(logprobs.gather(1, ids[0, start:, None]).squeeze(1))
        (weight * plain[-1] * torch.tensor(mask)).sum().backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    policy = Policy(load(tmp_path), temperature=0.8)
    for batch in pack(rollouts, budget_tokens=budget):
        row = to_row(batch, CPU)
        logprobs, entropy = policy(row)
        assert (entropy > 0).all()
        for place, index in enumerate(batch.rollouts.tolist()):
            own = row.sequence_ids == place
            torch.testing.assert_close(logprobs[own], plain[index].detach(), rtol=1e-5, atol=1e-5)
            assert row.mask[own].tolist() == [bool(value) for value in masks[index]]
            assert row.sampler_logprobs[own].tolist() == [-0.5 * value for value in masks[index]]
        (weights[row.rollouts][row.sequence_ids] * logprobs)[row.mask].sum().backward()
    found = dict(policy.decoder.named_parameters())
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name].grad, gradient, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_activation_checkpointing_changes_no_gradient(tmp_path):
    model_of("qwen3", tmp_path)
    found = []
    for checkpointing in (False, True):
        policy = Policy(load(tmp_path, activation_checkpointing=checkpointing), temperature=1.0)
        row = to_row(pack(RAGGED, budget_tokens=100)[0], CPU)
        found.append(torch.autograd.grad(policy(row)[0].sum(), list(policy.parameters())))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
