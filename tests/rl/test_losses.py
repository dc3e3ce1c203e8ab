"""Numbers worked out by hand."""

import math

import pytest
import torch

from nanodag import registry
from nanodag.rl import losses

ADVANTAGES = {
    # mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4, std 1/2, to which 1e-6 is added
    "grpo": ([1, 0, 0, 0], [0] * 4, [5, 6, 7, 8], [0.75 / 0.500001] + [-0.25 / 0.500001] * 3),
    # two groups of different size do not mix
    "dr_grpo": ([1, 5, 0, 7, 3], [0, 1, 0, 1, 1], [1] * 5, [0.5, 0.0, -0.5, 2.0, -2.0]),
    # 1 - mean(0, 0, 0) = 1; 0 - mean(1, 0, 0) = -1/3
    "rloo": ([1, 0, 0, 0], [0] * 4, [5, 6, 7, 8], [1, -1 / 3, -1 / 3, -1 / 3]),
    # tokens 1 1 1 0: mean 3/4, unbiased variance (3/16 + 9/16) / 3 = 1/4, std 1/2
    "reinforce_pp": ([1, 0], [0, 1], [3, 1], [0.5, -1.5]),
    # differences 1/2, -1/2 in group 0, 0 in group 1; by tokens 1/2 1/2 1/2 -1/2 0 0: mean 1/6, variance 5/30 = 1/6
    "reinforce_pp_baseline": ([1, 0, 5], [0, 0, 1], [3, 1, 2], [6**0.5 * n for n in (1 / 3, -2 / 3, -1 / 6)]),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_of_rewards(name):
    rewards, group_ids, lengths, wanted = ADVANTAGES[name]
    given = (torch.tensor(rewards).float(), torch.tensor(group_ids), torch.tensor(lengths))
    found = registry.load("advantage", name)(*given)
    assert found.tolist() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "value", "gradient", "is_clipped"),
    [
        (1.0, 2.0, 0.0, -2.0, -2.0, False),
        (1.2, 2.0, 0.0, -2.4, -2.4, False),  # inside clip-higher's 1.28
        (1.5, 2.0, 0.0, -2.56, 0.0, True),  # good and already likelier: no more push
        (0.5, 2.0, 0.0, -1.0, -1.0, False),  # good but less likely: full push
        (0.5, -2.0, 0.0, 1.6, 0.0, True),  # bad and already less likely
        (1.5, -2.0, 0.0, 3.0, 3.0, False),
        (5.0, -2.0, 0.0, 10.0, 10.0, False),  # bad and much likelier
        (5.0, -2.0, 3.0, 6.0, 0.0, True),
        (5.0, 2.0, 3.0, -2.56, 0.0, True),
    ],
)
def test_clipped_loss_of_one_token(ratio, advantage, dual_clip, value, gradient, is_clipped):
    trainer = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    token = (torch.tensor([-1.0]), torch.tensor([advantage]), torch.tensor([True]), torch.tensor([0]))
    out = losses.ppo_clip(trainer, *token, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    (found,) = torch.autograd.grad(out.values.sum(), trainer)
    assert (out.values.item(), found.item()) == (pytest.approx(value), pytest.approx(gradient))
    assert bool(out.clipped) is is_clipped


OLD = torch.tensor([-1.0, -2.0, -9.0, -1.0])
SHIFTS = torch.tensor([0.3, 0.1, 5.0, -0.4])  # of the trainer; the third token is masked, the fourth another response
KEPT, RESPONSES = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 0, 1])
E1, E2, E3, E4 = (math.exp(shift) for shift in (0.3, 0.1, 0.2, -0.4))  # E3: of the mean of the first response's


def one_step(loss, last, **options):
    """PolicyLoss, and the gradient of the sum of its trained values. last: advantage of the second response; the first
    one's is 2."""
    trainer = (OLD + SHIFTS).requires_grad_()
    out = loss(trainer, OLD, torch.tensor([2.0, 2.0, 2.0, last]), KEPT, RESPONSES, **options)
    (gradient,) = torch.autograd.grad(out.values[KEPT].sum(), trainer)
    return out, gradient[KEPT].tolist()


@pytest.mark.parametrize(
    ("name", "last", "bounds", "values", "gradient", "clipped"),
    [
        ("gspo", -1.0, (0.9, 0.9), [-2 * E3, -2 * E3, E4], [-2 * E3, -2 * E3, E4], (False, False, False)),
        # clipped as a whole: also its second token, whose own ratio exp(0.1) is within the bound
        ("gspo", 1.0, (0.2, 0.15), [-2.3, -2.3, -E4], [0, 0, -E4], (True, True, False)),
        # the weight is clipped, and the gradient kept
        ("cispo", -1.0, (0.2, 0.2), [2.4 * 0.7, 2 * E2 * 1.9, -0.8 * 1.4], [-2.4, -2 * E2, 0.8], (True, False, True)),
        ("cispo", -1.0, (1.0, 4.0), [2 * E1 * 0.7, 2 * E2 * 1.9, -E4 * 1.4], [-2 * E1, -2 * E2, E4], (False,) * 3),
        ("reinforce", -1.0, (), [1.4, 3.8, -1.4], [-2, -2, 1], (False, False, False)),  # the old policy is ignored
    ],
)
def test_losses_of_two_responses(name, last, bounds, values, gradient, clipped):
    out, found = one_step(registry.load("policy_loss", name), last, **dict(zip(("clip_low", "clip_high"), bounds)))
    assert out.values[KEPT].tolist() == pytest.approx(values) and found == pytest.approx(gradient)
    assert out.clipped.tolist() == [*clipped[:2], False, clipped[2]]


def test_gspo_has_the_gradient_of_the_paper_s_sequence_form():
    trainer = (OLD + SHIFTS).requires_grad_()
    in_tokens = losses.gspo(trainer, OLD, torch.ones(4), KEPT, RESPONSES, clip_low=0.9, clip_high=0.9)
    weights = losses.by_sequence(KEPT, RESPONSES, losses.Totals(num_tokens=3, num_sequences=2, max_tokens=4))
    of_tokens = torch.autograd.grad((weights * in_tokens.values)[KEPT].sum(), trainer)[0]
    first, second = (trainer - OLD)[:2].mean().exp(), (trainer - OLD)[3].exp()  # differentiated through the mean
    torch.testing.assert_close(of_tokens, torch.autograd.grad(-(first + second) / 2, trainer)[0])


def test_sapo_has_the_plain_gradient_at_ratio_one_and_less_far_from_it():
    def weight(ratio, tau):
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return 4 * gate * (1 - gate) * ratio  # by hand: d/dlogp of 4 / tau * sigmoid(tau * (ratio - 1))

    out, gradient = one_step(losses.sapo, -1.0, sapo_positive=1.5, sapo_negative=3.0)
    assert gradient == pytest.approx([-2 * weight(E1, 1.5), -2 * weight(E2, 1.5), weight(E4, 3.0)])
    assert out.values[3].item() == pytest.approx(4 / 3 / (1 + math.exp(-3 * (E4 - 1))))
    assert weight(1.0, 1.5) == 1.0 and not out.clipped.any()


def test_token_sequence_and_constant_weights():
    # two responses of 3 and 1 trained tokens, one masked token in each
    mask = torch.tensor([True, True, True, False, True, False])
    sequence_ids = torch.tensor([0, 0, 0, 0, 1, 1])
    totals = losses.Totals(num_tokens=4, num_sequences=2, max_tokens=8)
    assert losses.by_token(mask, sequence_ids, totals).tolist() == [0.25, 0.25, 0.25, 0, 0.25, 0]
    assert losses.by_sequence(mask, sequence_ids, totals).tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0, 0.5, 0])
    assert losses.by_constant(mask, sequence_ids, totals).tolist() == [1 / 16, 1 / 16, 1 / 16, 0, 1 / 16, 0]


def test_kl_estimates_of_a_token_twice_as_likely_as_under_the_reference():
    trainer, reference, x = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]), math.log(2)
    for name, wanted in {"k1": x, "k2": x**2 / 2, "k3": 0.5 - 1 + x, "low_var": 0.5 - 1 + x}.items():
        assert registry.load("kl", name)(trainer, reference).item() == pytest.approx(wanted), name


def test_low_var_kl_is_at_most_ten_where_k3_explodes():
    trainer, reference = torch.tensor([-40.0], requires_grad=True), torch.tensor([-1.0])
    assert losses.k3(trainer, reference).item() > 1e16
    bounded = losses.low_var(trainer, reference)
    assert bounded.item() == 10.0
    assert torch.autograd.grad(bounded.sum(), trainer)[0].item() == 0.0


# Two responses of two trained tokens each and one masked token; old - sampler is log of the weights 1.5, 3, 0.5, 0.8
SAMPLER = torch.tensor([-1.0, -1.0, -9.0, -1.0, -1.0])
CORRECTED_OLD = SAMPLER + torch.tensor([1.5, 3.0, 7.0, 0.5, 0.8]).log()
CORRECTED_MASK, CORRECTED_IDS = torch.tensor([True, True, False, True, True]), torch.tensor([0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "floor", "cap", "weights"),
    [
        ("tis", 0.0, 2.0, [1.5, 2.0, 0.0, 0.5, 0.8]),
        ("tis", 0.6, 2.0, [1.5, 2.0, 0.0, 0.6, 0.8]),
        ("tis_sequence", 0.0, 2.0, [2.0, 2.0, 0.0, 0.4, 0.4]),  # products 4.5 and 0.4
        ("tis_sequence", 0.5, 9.0, [4.5, 4.5, 0.0, 0.5, 0.5]),
        ("icepop", 0.6, 2.0, [1.5, 0.0, 0.0, 0.0, 0.8]),
        ("icepop", 0.0, 5.0, [1.5, 3.0, 0.0, 0.5, 0.8]),
        ("mis", 0.0, 2.0, [0.0, 0.0, 0.0, 0.4, 0.4]),
        ("mis", 0.5, 5.0, [4.5, 4.5, 0.0, 0.0, 0.0]),
        ("mis_geometric", 0.7, 2.2, [4.5**0.5, 4.5**0.5, 0.0, 0.0, 0.0]),
        ("mis_geometric", 0.6, 2.1, [0.0, 0.0, 0.0, 0.4**0.5, 0.4**0.5]),
    ],
)
def test_importance_weights_of_tokens_and_responses(name, floor, cap, weights):
    correction = registry.load("correction", name)
    found = correction(CORRECTED_OLD, SAMPLER, CORRECTED_MASK, CORRECTED_IDS, floor=floor, cap=cap)
    assert found.tolist() == pytest.approx(weights, rel=1e-6)


def test_opsm_leaves_out_bad_responses_that_the_policy_has_left():
    trainer = SAMPLER - torch.tensor([0.3, 0.1, 50.0, 0.0, 0.3])  # means 0.2 and 0.15 nats a token
    bad, good = torch.full((5,), -1.0), torch.full((5,), 1.0)
    cases = [(bad, 0.17, [0.0, 0.0, 0.0, 1.0, 1.0]), (bad, 0.1, [0.0] * 5), (bad, 0.3, [1.0] * 5)]
    for advantages, limit, kept in (*cases, (good, 0.1, [1.0] * 5)):
        found = losses.off_policy_kept(trainer, SAMPLER, advantages, CORRECTED_MASK, CORRECTED_IDS, limit=limit)
        assert found.tolist() == kept
