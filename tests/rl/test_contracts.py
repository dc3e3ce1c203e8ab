"""What every entry of each kind promises, checked over all of them: a new entry is tested by being listed."""

import pytest
import torch

from nanodag import registry as entries
from nanodag.errors import ConfigError
from nanodag.rl.losses import Totals, unbiased

T = 24  # tokens of three responses of 11, 7 and 6 tokens
SEQUENCE_IDS = torch.tensor([0] * 11 + [1] * 7 + [2] * 6)
ADVANTAGES = torch.tensor([1.5] * 11 + [-0.5] * 7 + [0.25] * 6)
MASK = torch.tensor([place not in (2, 3, 12, 20) for place in range(T)])
PARTS = slice(0, 11), slice(11, 18), slice(18, T)


def logprobs(seed: int) -> torch.Tensor:
    return -torch.rand(T, generator=torch.Generator().manual_seed(seed)) * 3


def ids_in(part: slice) -> torch.Tensor:
    return SEQUENCE_IDS[part] - SEQUENCE_IDS[part][0]


def all_of(kind: str):
    # gae gives a number a token, by a contract of its own: tests/rl/test_critic.py
    return pytest.mark.parametrize("name", [name for name in entries.names(kind) if name != "gae"])


def test_every_entry_can_be_imported_and_a_users_own_function_by_its_path():
    assert all(callable(entries.load(kind, name)) for kind in entries.KINDS for name in entries.names(kind))
    assert entries.load("policy_loss", "torch.nn.functional:relu") is torch.nn.functional.relu


@pytest.mark.parametrize("name", ["ppo_clap", "torch.nn", "torch:no_such_thing", "no_such_package:f"])
def test_an_entry_that_does_not_exist_is_refused(name):
    with pytest.raises(ConfigError, match=r"ppo_clip|cannot be imported"):
        entries.load("policy_loss", name)


# those that normalise over the batch give a group without spread a little of it
BY_GROUP = [name for name in entries.names("advantage") if name not in ("reinforce_pp", "reinforce_pp_baseline", "gae")]


def counts(size: int) -> torch.Tensor:
    return torch.arange(3, 3 + size)


@all_of("advantage")
def test_equal_rewards_give_exactly_zero(name):
    advantages = entries.load("advantage", name)
    for reward in (0.1, 0.0, 1 / 3, 1e8, -7.3):  # the mean of three 0.1 is not 0.1, in float32 or float64
        for size in (3, 7, 8, 11):
            found = advantages(torch.full((size,), reward), torch.zeros(size, dtype=torch.int64), counts(size))
            assert found.tolist() == [0.0] * size
    assert advantages(torch.tensor([2.5]), torch.tensor([4]), torch.tensor([1])).tolist() == [0.0]


@pytest.mark.parametrize("name", BY_GROUP)
def test_a_group_of_equal_rewards_among_others_gets_exactly_zero(name):
    rewards, group_ids = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1]), torch.tensor([0, 1, 0, 1, 0])
    found = entries.load("advantage", name)(rewards, group_ids, counts(5))
    assert found[[0, 2, 4]].tolist() == [0.0] * 3 and found[1] > 0 > found[3]


@all_of("advantage")
def test_advantages_go_by_group_id_not_by_position(name):
    advantages = entries.load("advantage", name)
    rewards = torch.tensor([1.0, 0.0, 3.0, 0.5, 0.25, 0.0, 2.0])
    group_ids = torch.tensor([9, 9, 9, -2, -2, 5, 5])
    order = torch.tensor([3, 0, 6, 1, 4, 2, 5])
    found = advantages(rewards, group_ids, counts(7))
    assert found.dtype == torch.float32
    torch.testing.assert_close(advantages(rewards[order], group_ids[order], counts(7)[order]), found[order])
    if name in BY_GROUP:
        alone = advantages(rewards[:3], torch.zeros(3, dtype=torch.int64), counts(3))
        torch.testing.assert_close(found[:3], alone)


@all_of("advantage")
def test_a_higher_reward_never_gets_a_lower_advantage(name):
    rewards = torch.tensor([0.0, 0.1, 0.5, 2.0])
    found = entries.load("advantage", name)(rewards, torch.zeros(4, dtype=torch.int64), counts(4))
    assert found.isfinite().all() and (found.diff() >= 0).all() and found[0] < 0 < found[-1]


@all_of("policy_loss")
def test_policy_loss_pushes_towards_the_advantage_and_stays_finite_when_policies_are_far_apart(name):
    for shift in (0.0, -200.0, 200.0):
        trainer = (logprobs(0) + shift).requires_grad_()
        out = entries.load("policy_loss", name)(trainer, logprobs(0), ADVANTAGES, MASK, SEQUENCE_IDS)
        (gradient,) = torch.autograd.grad((out.values * MASK).sum(), trainer)
        assert out.values.shape == out.ratio.shape == out.clipped.shape == (T,) and out.clipped.dtype == torch.bool
        assert out.values.isfinite().all() and out.ratio.isfinite().all() and gradient.isfinite().all()
        assert shift or (gradient.sign() == -ADVANTAGES.sign() * MASK).all()  # descent raises what was good


@all_of("policy_loss")
@pytest.mark.parametrize("aggregation", entries.names("aggregation"))
def test_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(name, aggregation):
    loss, aggregate = entries.load("policy_loss", name), entries.load("aggregation", aggregation)
    totals = Totals(num_tokens=20, num_sequences=3, max_tokens=16)

    def update(*parts):
        trainer = logprobs(0).requires_grad_()
        total = torch.zeros(())
        for part in parts:
            out = loss(trainer[part], logprobs(1)[part], ADVANTAGES[part], MASK[part], ids_in(part))
            total = total + (aggregate(MASK[part], ids_in(part), totals) * out.values).sum()
        return total, *torch.autograd.grad(total, trainer)

    for parts in (PARTS, (slice(0, 18), PARTS[2])):
        torch.testing.assert_close(update(*parts), update(slice(0, T)))


@all_of("aggregation")
def test_aggregation_gives_masked_tokens_no_weight_also_where_all_are_masked(name):
    aggregate = entries.load("aggregation", name)
    weights = aggregate(MASK, SEQUENCE_IDS, Totals(20, 3, 16))
    assert weights.dtype == torch.float32 and weights.sign().tolist() == MASK.float().tolist()
    assert aggregate(torch.zeros_like(MASK), SEQUENCE_IDS, Totals(0, 0, 16)).tolist() == [0.0] * T


@all_of("kl")
def test_kl_estimates_have_the_true_kl_as_expectation_and_are_zero_for_equal_policies(name):
    estimate = entries.load("kl", name)
    assert estimate(logprobs(0), logprobs(0)).tolist() == [0.0] * T
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.48, 0.33, 0.19]).log()
    expectation = (policy.exp() * estimate(policy, reference)).sum()
    true_kl = (policy.exp() * (policy - reference)).sum()
    tolerance = 0.05 if name == "k2" else 1e-5  # k2 is biased in third order
    assert expectation.item() == pytest.approx(true_kl.item(), rel=tolerance, abs=1e-7)


def corrected(name, **options):
    taken = entries.entries_of("correction")[name].options
    return entries.load("correction", name, {key: value for key, value in options.items() if key in taken})


@all_of("correction")
def test_correction_is_bounded_carries_no_gradient_and_ignores_masked_tokens(name):
    old, sampler = logprobs(0).requires_grad_(), logprobs(1)
    correction = corrected(name, floor=0.5, cap=1.5)
    weights = correction(old, sampler, MASK, SEQUENCE_IDS)
    assert not weights.requires_grad and weights.shape == (T,)
    assert (weights[~MASK] == 0).all() and (weights >= 0).all() and (weights <= 1.5).all()
    assert correction(sampler, sampler, MASK, SEQUENCE_IDS)[MASK].tolist() == [1.0] * 20
    assert correction(sampler + 300.0, sampler, MASK, SEQUENCE_IDS).isfinite().all()


@all_of("correction")
def test_correction_does_not_depend_on_the_split_into_micro_batches(name):
    correction = corrected(name, floor=0.1, cap=3.0)
    tokens = logprobs(0) + logprobs(1) / 20, logprobs(0), MASK
    parts = [correction(*(values[part] for values in tokens), ids_in(part)) for part in PARTS]
    torch.testing.assert_close(torch.cat(parts), correction(*tokens, SEQUENCE_IDS))


@all_of("kl")
def test_unbiased_kl_has_the_kl_and_its_gradient_as_expectation_off_policy_too(name):
    logits = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    policy, reference = logits.log_softmax(-1), torch.tensor([0.5, 0.3, 0.2]).log()
    old = torch.tensor([0.2, 0.2, 0.6]).log()  # what the tokens were sampled from
    estimates = unbiased(entries.load("kl", name)(policy, reference), policy, reference, old)
    found = torch.autograd.grad((old.exp() * estimates).sum(), logits, retain_graph=True)[0]
    true_kl = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close(found, torch.autograd.grad(true_kl, logits, retain_graph=True)[0])
    if name != "k2":  # biased in its value
        torch.testing.assert_close((old.exp() * estimates).sum(), true_kl)
