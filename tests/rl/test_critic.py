"""PPO's critic: advantages and value loss against numbers worked out by hand, its updates in plain PyTorch, a stage."""

import json
from pathlib import Path

import pytest
import torch

from nanodag.errors import ConfigError
from nanodag.rl.advantages import gae, reward_of_last
from nanodag.rl.rollouts.metrics import critic_metrics
from nanodag.rl.trainer.critic import value_loss
from nanodag.rl.trainer.policy import check_beside
from nanodag.tokenizer.bpe import save_tokenizer
from tests.forks import call
from tests.rl.models import save_tiny_model, trainer_of
from tests.rl.rollouts import rollout
from tests.rl.stages import make_job, metrics, run


def test_a_reward_stands_at_the_last_trained_token_of_its_response():
    rewards, ids = torch.tensor([2.0, 3.0, 5.0, 7.0]), torch.tensor([0, 0, 0, 1, 1, 1, 2])
    trained = torch.tensor([True, True, False, True, False, True, False])
    assert reward_of_last(rewards, trained, ids).tolist() == [0, 2, 0, 0, 0, 3, 0]


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.9, 0.7), (1.0, 1.0)])
def test_gae_equals_the_sum_of_discounted_errors_on_ragged_responses_and_passes_over_tools(gamma, gae_lambda):
    """Equation 16 as it stands, without the recursion."""
    draw, lengths = torch.Generator().manual_seed(3), [5, 1, 9, 3]
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    values, rewards = torch.randn(2, sum(lengths), generator=draw, dtype=torch.float64)
    mask = torch.rand(sum(lengths), generator=draw) > 0.2
    found, returns = gae(rewards, values, mask, ids, gamma=gamma, gae_lambda=gae_lambda)
    assert (found[~mask] == 0).all() and torch.allclose(returns, (found + values) * mask)
    nothing = gae(rewards, values, torch.zeros_like(mask), ids, gamma=gamma, gae_lambda=gae_lambda)
    assert not torch.cat(nothing).any()
    for response in range(4):
        own = (ids == response) & mask
        following = torch.cat([values[own][1:], torch.zeros(1)])[: int(own.sum())]
        errors = rewards[own] + gamma * following - values[own]
        for t, advantage in enumerate(found[own].tolist()):
            rest = errors[t:] * (gamma * gae_lambda) ** torch.arange(len(errors) - t)
            assert advantage == pytest.approx(rest.sum().item())


def test_the_value_loss_is_the_larger_of_the_plain_and_the_bounded_one():
    values = torch.tensor([1.0, 1.0, 1.0, -1.0], requires_grad=True)
    old, returns = torch.tensor([0.9, 0.0, 0.0, 0.0]), torch.tensor([2.0, 2.0, 0.0, -3.0])
    losses, clipped = value_loss(values, old, returns, clip=0.2)
    # inside; too fast towards 2: (0.2 - 2)^2; away from 0: plain; too fast towards -3: (-0.2 + 3)^2
    assert losses.tolist() == pytest.approx([0.5, 1.62, 0.5, 3.92])
    assert clipped.tolist() == [False, True, False, True]
    losses.sum().backward()
    assert values.grad.tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.0])
    assert value_loss(values, old, returns, clip=0.0)[0].tolist() == pytest.approx([0.5, 0.5, 0.5, 2.0])


def test_explained_variance_by_hand_is_the_same_on_two_ranks():
    # values 1, 2, 3 for returns 1, 3, 5: errors 0, 1, 2, variance 2/3 of 8/3
    names = ("tokens", "value", "return", "return_squared", "error", "error_squared", "value_loss", "clipped")
    ranks = (1, 1, 1, 1, 0, 0, 0.5, 1), (2, 5, 8, 34, 3, 5, 1.5, 2)
    one, other = ({"summed": dict(zip(names, sums)), "largest": {}} for sums in ranks)
    found = critic_metrics([one, other], num_updates=2)
    assert found["value_explained"] == pytest.approx(0.75) and found["value_clipped_share"] == 0.5
    assert (found["value_mean"], found["return_mean"], found["value_loss"]) == (2.0, 3.0, 1.0)
    assert "value_explained" not in critic_metrics([one], num_updates=1)


def samples():
    """Prompt, response and reward of six samples in two groups."""
    draw = torch.Generator().manual_seed(1)
    return [
        ([1, 2 + g], torch.randint(3, 30, (2 + s,), generator=draw).tolist(), float((g + s) % 2))
        for g in range(2)
        for s in range(3)
    ]


def trained(folder, model, critic, zero_stage):
    """The replies of two steps with a policy and a critic, the critic's weights; a checkpoint between them is exact."""
    own = {"learning_rate": 1e-2, "epochs": 2, "value_clip": 0.05, "gamma": 0.9, "gae_lambda": 0.8, "warmup_steps": 1}
    values = {"critic": {**own, "model": "policy" if critic == model else "input"}, "zero_stage": zero_stage}
    values |= {"weight_decay": 0.0, "gradient_clipping": 0, "updates_per_step": 2, "max_new_tokens": 8}
    values |= {"inputs": {"model": "sft"} | ({} if critic == model else {"critic": "other"})}
    values |= {"advantage": "gae", "precision": "fp32", "sampler": {"context": 64}, "micro_batch_tokens": 64}
    first, again = (trainer_of(model, beside={"critic": critic}, **values) for _ in range(2))
    rollouts = [rollout(str(n // 3), n % 3, *tokens, reward=reward) for n, (*tokens, reward) in enumerate(samples())]
    replies = [first.train(1, rollouts)]
    folder.mkdir()
    first.save(folder)
    replies.append(first.train(2, rollouts))
    again.load(folder)
    assert {**again.train(2, rollouts), "peak_flops": replies[1]["peak_flops"]} == replies[1]
    after, others = (dict(one._credit.critic.engine.full_state_dict()) for one in (first, again))
    assert all(torch.equal(tensor, others[name]) for name, tensor in after.items())
    return replies, {name: tensor.clone() for name, tensor in after.items()}


@pytest.mark.parametrize(("zero_stage", "own_model"), [(3, False), (1, True)])
def test_a_critic_is_trained_as_in_plain_pytorch_and_resumes_exactly(tmp_path, zero_stage, own_model):
    model = save_tiny_model(tmp_path / "model")
    critic = save_tiny_model(tmp_path / "critic", seed=5) if own_model else model
    replies, weights = call(trained, tmp_path / "out", model, critic, zero_stage)
    first, second = replies
    assert (first["num_updates"], first["gradient_norm"], second["num_updates"]) == (0, 0.0, 2)
    plain = PlainCritic(critic)
    explained = [plain.step(), plain.step()]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=2e-5, msg=name)
    for reply, (loss, share) in zip(replies, explained, strict=True):
        measured = critic_metrics([reply["critic"]], num_updates=4)
        assert measured["value_loss"] == pytest.approx(loss, rel=1e-4)
        assert measured.get("value_explained", 0.0) == pytest.approx(share, abs=1e-4)


class PlainCritic(torch.nn.Module):
    """The same critic from transformers, each response alone, torch.optim, GAE by its definition."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel

        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.model = AutoModel.from_pretrained(folder)
        self.head = torch.nn.Linear(16, 1)
        self.head.load_state_dict({"weight": torch.zeros(1, 16), "bias": torch.zeros(1)})
        self._optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
        self._samples = samples()

    def values(self, prompt, response):
        hidden = self.decoder.model(torch.tensor([prompt + response])).last_hidden_state[0]
        return self.head(hidden[len(prompt) - 1 : -1]).squeeze(-1)

    def step(self) -> tuple[float, float]:
        """The mean value loss of the step's updates, and the explained variance before them."""
        old = [self.values(prompt, response).detach() for prompt, response, _ in self._samples]
        returns = []
        for values, (_, _, reward) in zip(old, self._samples, strict=True):
            errors = torch.cat([0.9 * values[1:], torch.tensor([reward])]) - values
            advantages = [sum(error * 0.72**n for n, error in enumerate(errors[t:])) for t in range(len(values))]
            returns.append(torch.stack(advantages) + values)
        everything, before = torch.cat(returns), torch.cat(old)
        explained = 1 - (everything - before).var() / everything.var()
        losses = []
        for _ in range(2):
            for part in (slice(0, 3), slice(3, 6)):
                values = torch.cat([self.values(*tokens) for *tokens, _ in self._samples[part]])
                before_it, aim = torch.cat(old[part]), torch.cat(returns[part])
                bounded = before_it + (values - before_it).clamp(-0.05, 0.05)
                loss = 0.5 * torch.maximum((values - aim) ** 2, (bounded - aim) ** 2).mean()
                self._optimizer.zero_grad()
                loss.backward()
                self._optimizer.step()
                losses.append(loss.item())
        return sum(losses) / len(losses), explained.item()


def test_a_critic_or_teacher_that_cannot_read_the_rollouts_is_refused(tmp_path):
    policy, other = save_tiny_model(tmp_path / "a", vocabulary=300), save_tiny_model(tmp_path / "b", vocabulary=320)
    tokens = {bytes([value]): value for value in range(256)}
    save_tokenizer(tokens, policy)
    save_tokenizer({**tokens, b"ab": 256}, other)
    with pytest.raises(ConfigError, match=r"critic.model .* has another tokenizer .* in 11 tokens"):
        check_beside("critic.model", other, policy, context=64)
    save_tokenizer(tokens, other)
    check_beside("teacher.model", other, policy, context=990)  # embeddings filled up to another size
    config = json.loads((other / "config.json").read_text())
    for field, value, why in (("max_position_embeddings", 32, "positions, fewer"), ("vocab_size", 256, "embeddings")):
        (other / "config.json").write_text(json.dumps(config | {field: value}))
        with pytest.raises(ConfigError, match=f"teacher.model .* has {value} {why}"):
            check_beside("teacher.model", other, policy, context=64)


def test_a_ppo_stage_warms_its_critic_up_and_then_learns(tmp_path):
    critic = {"learning_rate": 1e-2, "warmup_steps": 2, "gae_lambda": 0.95, "epochs": 2}
    ten = {"num_steps": 10, "checkpoint_every": 10, "eval_every": 10}
    job = make_job(tmp_path, advantage="gae", critic=critic, filters=[], **ten)
    run(job)
    steps = metrics(job)
    assert [line["version"] for line in steps] == [0, 0, *range(1, 9)]
    assert [line["gradient_norm"] > 0 for line in steps] == [False, False, *[True] * 8]
    assert all(line["critic_gradient_norm"] > 0 and line["value_loss"] > 0 for line in steps)
    assert steps[0]["value_mean"] == 0.0 and abs(steps[0].get("value_explained", 0.0)) < 1e-9
    assert steps[-1]["value_explained"] > 0 or steps[-1]["value_mean"] > 0
    assert all(line["mismatch_largest"] < 1e-4 for line in steps)
    evals = metrics(job, "eval")
    assert evals[-1]["eval_reward"] > evals[0]["eval_reward"]
