"""Packed rows: who is where, who sees whom, and the same numbers as without packing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nanodag.errors import ConfigError
from nanodag.rl.rollouts.rollout import Rollout, Span, prompt_span, sampled_span
from nanodag.rl.trainer.policy import load_policy, to_row
from nanodag.rl.trainer.rows import pack
from tests.rl.rollouts import RAGGED, rollout

CPU = torch.device("cpu")


SHAPE = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.4,
    tie_word_embeddings=False,
)
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
    "wide heads": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    "window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=3)),
    "wide heads, window": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, head_dim=16, use_sliding_window=True, sliding_window=2, max_window_layers=1)
    ),
}


def test_a_row_written_out_by_hand():
    ((row,),) = pack([RAGGED[0], RAGGED[2]], budget_tokens=100)
    #                         prompt     4, 5 of (4, 5, 6)   9 of (9, 10)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    assert row.prompts.tolist() == [[0, 3]]
    assert row.responses.tolist() == [[3, 2, 0], [5, 1, 0]]
    assert row.predictors.tolist() == [2, 3, 4, 2, 5]
    assert row.targets.tolist() == [4, 5, 6, 9, 10]
    assert row.sequence_ids.tolist() == [0, 0, 0, 1, 1]
    assert row.mask.all() and row.rollouts.tolist() == [0, 1]


def every_target(rows) -> list[tuple[int, list[int]]]:
    found = []
    for row in rows:
        found += [
            (index, row.targets[(row.sequence_ids == place) & row.mask].tolist())
            for place, index in enumerate(row.rollouts.tolist())
        ]
    return sorted(pair for pair in found if pair[1])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("budget", [7, 11, 100])
def test_every_response_is_trained_once_within_the_budget_and_ranks_get_the_same_number_of_rows(budget, num_ranks):
    ranks = pack(RAGGED, budget_tokens=budget, num_ranks=num_ranks)
    rows = [row for rank in ranks for row in rank]
    assert len(ranks) == num_ranks and len({len(rank) for rank in ranks}) == 1
    assert all(row.num_tokens <= budget for row in rows)
    assert every_target(rows) == [(i, list(r.response_token_ids)) for i, r in enumerate(RAGGED)]


def test_rows_of_two_ranks_are_of_like_size():
    many = [rollout(str(g), s, [1] * (5 + g), [2] * (3 + 7 * s)) for g in range(8) for s in range(4)]
    first, second = pack(many, budget_tokens=120, num_ranks=2)
    for one, other in zip(first, second, strict=True):
        assert abs(one.num_tokens - other.num_tokens) <= 0.2 * one.num_tokens


def test_a_rollout_above_the_budget_is_refused_with_what_to_raise():
    with pytest.raises(ConfigError, match="Raise micro_batch_tokens to at least 6"):
        pack(RAGGED, budget_tokens=5)


def plain_scores(model, temperature: float, rollouts=RAGGED) -> dict[int, torch.Tensor]:
    """Each rollout alone through the model's own attention: the log-probability of each response token."""
    scores = {}
    for index, one in enumerate(rollouts):
        ids = torch.tensor([one.prompt_token_ids + one.response_token_ids])
        logprobs = log_softmax(model(ids).logits[0] / temperature, dim=-1)
        start = len(one.prompt_token_ids)
        scores[index] = logprobs[start - 1 : -1].gather(1, ids[0, start:, None]).squeeze(1)
    return scores


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("budget", [7, 100])
def test_packed_with_shared_prompts_equals_each_rollout_alone_in_value_and_gradient(kind, budget, tmp_path):
    torch.manual_seed(3)
    model = MODELS[kind]().eval()
    model.save_pretrained(tmp_path)
    weights = torch.rand(len(RAGGED)) - 0.5
    plain = plain_scores(model, 0.8)
    sum(weights[i] * scores.sum() for i, scores in plain.items()).backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    policy = load_policy(tmp_path, temperature=0.8)
    for batch in pack(RAGGED, budget_tokens=budget)[0]:
        row = to_row(batch, CPU)
        logprobs, entropy = policy(row)
        assert (entropy > 0).all()
        for place, index in enumerate(batch.rollouts.tolist()):
            torch.testing.assert_close(logprobs[row.sequence_ids == place], plain[index].detach(), rtol=1e-5, atol=1e-5)
        (weights[row.rollouts][row.sequence_ids] * logprobs).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def several_turns(group: str, sample: int, prompt: list[int], turns: list[tuple[str, list[int]]]) -> Rollout:
    spans = [
        sampled_span(ids, [-0.5] * len(ids), version=0)
        if kind == "sampled"
        else Span(kind="tool", token_ids=tuple(ids))
        for kind, ids in turns
    ]
    plain = rollout(group, sample, prompt, [1])
    return replace(plain, spans=(prompt_span(prompt), *spans))


def test_a_response_of_several_turns_equals_itself_alone_and_only_what_was_sampled_has_a_gradient(tmp_path):
    torch.manual_seed(3)
    model = MODELS["qwen3"]().eval()
    model.save_pretrained(tmp_path)
    mixed = [
        several_turns("a", 0, [1, 2, 3], [("sampled", [4, 5]), ("tool", [6, 7, 8]), ("sampled", [9])]),
        RAGGED[2],
        several_turns("a", 2, [1, 2, 3], [("tool", [10]), ("sampled", [11, 12]), ("sampled", [13]), ("tool", [14])]),
        several_turns("b", 0, [7], [("sampled", [15]), ("tool", [16, 17]), ("sampled", [18, 19]), ("tool", [20, 21])]),
    ]
    wanted_masks = [[1, 1, 0, 0, 0, 1], [1, 1], [0, 1, 1, 1, 0], [1, 0, 0, 1, 1, 0, 0]]
    plain = plain_scores(model, 1.0, mixed)
    total = sum(
        (torch.tensor(wanted_masks[index], dtype=torch.float32) * scores).sum() for index, scores in plain.items()
    )
    total.backward()
    policy = load_policy(tmp_path, temperature=1.0)
    for batch in pack(mixed, budget_tokens=20)[0]:
        row = to_row(batch, CPU)
        logprobs, _ = policy(row)
        for place, index in enumerate(batch.rollouts.tolist()):
            own = row.sequence_ids == place
            assert row.mask[own].tolist() == [bool(value) for value in wanted_masks[index]]
            torch.testing.assert_close(logprobs[own], plain[index].detach(), rtol=1e-5, atol=1e-5)
            assert row.sampler_logprobs[own].tolist() == [-0.5 * value for value in wanted_masks[index]]
        logprobs[row.mask].sum().backward()
    found = dict(policy.decoder.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)


def test_no_gradient_flows_between_responses_of_a_group(tmp_path):
    torch.manual_seed(3)
    MODELS["qwen3"]().save_pretrained(tmp_path)
    policy = load_policy(tmp_path, temperature=1.0)
    ((batch,),) = pack(RAGGED[:3], budget_tokens=100)
    row = to_row(batch, CPU)
    embedded = []
    policy.decoder.model.embed_tokens.register_forward_hook(
        lambda module, arguments, output: embedded.append(output.detach().requires_grad_()) or embedded[0]
    )
    logprobs, _ = policy(row)
    second = batch.rollouts.tolist().index(2)
    (gradient,) = torch.autograd.grad(logprobs[row.sequence_ids == second][-1], embedded[0])
    touched = set(np.flatnonzero(gradient[0].abs().sum(-1).numpy() > 0).tolist())
    prompt = [place for place in range(batch.num_tokens) if batch.token_ids[place] in (1, 2, 3)]
    own = range(batch.responses[second, 0], batch.responses[second, 0] + batch.responses[second, 1])
    assert touched == {*prompt, *own}


def test_activation_checkpointing_changes_no_gradient(tmp_path):
    torch.manual_seed(3)
    MODELS["qwen3"]().save_pretrained(tmp_path)
    found = []
    for checkpointing in (False, True):
        policy = load_policy(tmp_path, temperature=1.0, checkpointing=checkpointing)
        row = to_row(pack(RAGGED, budget_tokens=100)[0][0], CPU)
        found.append(torch.autograd.grad(policy(row)[0].sum(), list(policy.parameters())))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
