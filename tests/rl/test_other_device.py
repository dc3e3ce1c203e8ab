"""What a trainer rank computes, on a device that is not the CPU: nothing of the CPU is mixed in, the same numbers.

Not covered: DeepSpeed, the optimizers, gradients.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from nanodag import registry as entries
from nanodag.config.kinds.rl import RLStage
from nanodag.model.folder import load
from nanodag.rl.advantages import distilled, gae, reward_of_last, step_rewards
from nanodag.rl.losses import Totals
from nanodag.rl.trainer.critic import ValueModel, whitened
from nanodag.rl.trainer.policy import Policy, to_row
from nanodag.rl.trainer.rows import pack
from nanodag.rl.trainer.update import PolicyObjective, Scored, kl_of_rollouts
from tests.rl.models import save_tiny_model
from tests.rl.rollouts import RAGGED
from tests.sampler.other_device import NAME, OtherDevice

CPU = torch.device("cpu")
BATCH = pack(RAGGED, budget_tokens=100)[0]
TOTALS = Totals(num_tokens=15, num_sequences=6, max_tokens=8)


def same_on_both(work, *, reads=True):
    """What `work(device)` returns, tensors and numbers, is the same on both devices, and was computed there; without
    reads, nothing of it was asked for on the host meanwhile."""
    here = work(CPU)
    with OtherDevice() as other:
        there = work(torch.device(NAME))
    assert reads or not other.reads
    for one, other in zip(here, there, strict=True):
        if isinstance(one, Tensor):
            assert other.device.type == NAME
            one, other = one.tolist(), other.tolist()
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)


def test_a_packed_row_is_scored_and_valued_the_same_and_so_are_gradients(tmp_path):
    policy = Policy(load(save_tiny_model(tmp_path)), temperature=0.7)
    critic = ValueModel(load(tmp_path))

    def work(device):
        row = to_row(BATCH, device)
        models = [
            (model, {n: p.detach().to(device) for n, p in model.named_parameters()}) for model in (policy, critic)
        ]
        weights = {name: p.requires_grad_() for name, p in models[0][1].items()}
        logprobs, entropies = functional_call(policy, weights, (row,))
        gradients = torch.autograd.grad(logprobs.sum(), list(weights.values()))
        with torch.no_grad():
            values = functional_call(*models[1], (row,))
        return [logprobs.detach(), entropies.detach(), values, *(gradient.flatten() for gradient in gradients)]

    same_on_both(work, reads=False)


def scored_row(device):
    count = len(BATCH.targets)
    numbers = torch.linspace(-2.0, -0.5, count).to(device)
    return Scored(
        row=replace(to_row(BATCH, device), sampler_logprobs=numbers + 0.3),
        trainer_logprobs=numbers,
        entropies=-numbers,
        old_logprobs=numbers + 0.1,
        advantages=torch.linspace(-1.0, 1.0, count).to(device),
        reference_logprobs=numbers - 0.2,
    )


CHOICES = [("policy_loss", name) for name in entries.names("policy_loss")]
CHOICES += [(kind, name) for kind in ("aggregation", "correction") for name in entries.names(kind)]
CHOICES += [("kl_kind", name) for name in entries.names("kl")]


@pytest.mark.parametrize(("field", "name"), CHOICES)
def test_every_loss_is_the_same(field, name):
    config = RLStage.of(kind="rl", data=["file:x"], kl_coefficient=0.1, entropy_coefficient=0.1, **{field: name})

    def work(device):
        loss, sums = PolicyObjective(config)(scored_row(device), TOTALS)
        return [loss, *sums.summed.values(), *sums.largest.values()]

    same_on_both(work, reads=False)


def test_what_goes_into_advantages_is_the_same():
    def work(device):
        scored = scored_row(device)
        row, values = scored.row, scored.advantages
        rewards = torch.linspace(0.0, 1.0, len(RAGGED), dtype=torch.float64).to(device)
        of_last = reward_of_last(rewards[row.rollouts], row.mask, row.sequence_ids)
        steps = step_rewards([[(0, 1.0)]] * len(RAGGED), row.mask, row.sequence_ids)
        advantages, returns = gae(of_last + steps, values, row.mask, row.sequence_ids, gamma=0.9, gae_lambda=0.8)
        ((white,),) = whitened([[advantages]], [[row]], lambda *numbers: list(numbers))
        objective = PolicyObjective(RLStage.of(kind="rl", data=["file:x"]))
        kl = kl_of_rollouts(objective.kl(values, values + 0.1), row, len(RAGGED))
        return [of_last, steps, advantages, returns, white, kl, *distilled(values, values, values - 1, coefficient=0.5)]

    same_on_both(work)


@pytest.mark.parametrize("name", [name for name in entries.names("advantage") if name != "gae"])
def test_advantages_of_groups_are_the_same(name):
    def work(device):
        arguments = ([0.0, 1.0, 0.5, 0.5], [0, 0, 1, 1], [3, 4, 5, 6])
        return [entries.load("advantage", name)(*(torch.tensor(one).to(device) for one in arguments))]

    same_on_both(work)
