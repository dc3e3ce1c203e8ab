"""Numbers worked out by hand."""

import math

import pytest
import torch

from nanodag.rl.advantages import dr_grpo, grpo, reinforce_pp, reinforce_pp_baseline, rloo
from nanodag.rl.losses import (
    Totals,
    by_constant,
    by_sequence,
    by_token,
    cispo,
    geometric_masked,
    gspo,
    k1,
    k2,
    k3,
    low_var,
    not_vetoed,
    off_policy_kept,
    ppo_clip,
    reinforce,
    sapo,
    sequence_masked,
    sequence_truncated,
    token_masked,
    truncated,
    unbiased,
)

GROUP = torch.zeros(4, dtype=torch.int64)
LENGTHS = torch.tensor([5, 6, 7, 8])


def test_grpo_of_one_right_answer_in_four():
    # rewards 1, 0, 0, 0: mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4, std 1/2: advantages 3/2 and -1/2
    found = grpo(torch.tensor([1.0, 0.0, 0.0, 0.0]), GROUP, LENGTHS)
    assert found.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_dr_grpo_and_rloo_of_one_right_answer_in_four():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert dr_grpo(rewards, GROUP, LENGTHS).tolist() == [0.75, -0.25, -0.25, -0.25]
    # 1 - mean(0, 0, 0) = 1; 0 - mean(1, 0, 0) = -1/3
    assert rloo(rewards, GROUP, LENGTHS).tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_two_groups_of_different_size_do_not_mix():
    rewards, group_ids = torch.tensor([1.0, 5.0, 0.0, 7.0, 3.0]), torch.tensor([0, 1, 0, 1, 1])
    assert dr_grpo(rewards, group_ids, torch.ones(5)).tolist() == [0.5, 0.0, -0.5, 2.0, -2.0]


def test_reinforce_pp_normalises_over_the_tokens_of_the_batch():
    # tokens 1 1 1 0: mean 3/4, unbiased variance (3/16 + 9/16) / 3 = 1/4, std 1/2
    found = reinforce_pp(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), torch.tensor([3, 1]))
    assert found.tolist() == pytest.approx([0.5, -1.5], rel=1e-6)


def test_reinforce_pp_with_a_baseline_subtracts_the_mean_of_the_group_first():
    # differences 1/2, -1/2 in group 0, 0 in group 1; by tokens 1/2 1/2 1/2 -1/2 0 0: mean 1/6, variance 5/30 = 1/6
    found = reinforce_pp_baseline(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1]), torch.tensor([3, 1, 2]))
    root = math.sqrt(1 / 6)
    assert found.tolist() == pytest.approx([1 / 3 / root, -2 / 3 / root, -1 / 6 / root], rel=1e-6)


def clipped(ratio: float, advantage: float, **options: float) -> tuple[float, float, bool]:
    """Value, gradient to the log-probability, and whether it was clipped, of one token with old logprob -1."""
    trainer = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    out = ppo_clip(
        trainer,
        torch.tensor([-1.0]),
        torch.tensor([advantage]),
        torch.tensor([True]),
        torch.tensor([0]),
        clip_low=0.2,
        clip_high=0.28,
        **options,
    )
    (gradient,) = torch.autograd.grad(out.values.sum(), trainer)
    return out.values.item(), gradient.item(), bool(out.clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "is_clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.2, 2.0, -2.4, -2.4, False),  # inside clip-higher's 1.28
        (1.5, 2.0, -2.56, 0.0, True),  # good and already likelier: no more push
        (0.5, 2.0, -1.0, -1.0, False),  # good but less likely: full push
        (0.5, -2.0, 1.6, 0.0, True),  # bad and already less likely
        (1.5, -2.0, 3.0, 3.0, False),
    ],
)
def test_clipped_loss_of_one_token(ratio, advantage, value, gradient, is_clipped):
    assert clipped(ratio, advantage) == (pytest.approx(value), pytest.approx(gradient), is_clipped)


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_much_likelier():
    assert clipped(5.0, -2.0) == (pytest.approx(10.0), pytest.approx(10.0), False)
    assert clipped(5.0, -2.0, dual_clip=3.0) == (pytest.approx(6.0), 0.0, True)
    assert clipped(5.0, 2.0, dual_clip=3.0) == clipped(5.0, 2.0)


OLD = torch.tensor([-1.0, -2.0, -9.0, -1.0])
SHIFTS = torch.tensor([0.3, 0.1, 5.0, -0.4])  # of the trainer; the third token is masked, the fourth another response
KEPT, RESPONSES = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 0, 1])


def one_step(loss, advantages, **options):
    """PolicyLoss and the gradient of the sum of its trained values."""
    trainer = (OLD + SHIFTS).requires_grad_()
    out = loss(trainer, OLD, torch.tensor(advantages), KEPT, RESPONSES, **options)
    (gradient,) = torch.autograd.grad(out.values[KEPT].sum(), trainer)
    return out, gradient.tolist()


def test_gspo_weighs_every_token_by_the_mean_ratio_of_its_response():
    # mean log ratio of the first response (0.3 + 0.1) / 2 = 0.2, of the second -0.4; no bound acts
    out, gradient = one_step(gspo, [2.0, 2.0, 2.0, -1.0], clip_low=0.9, clip_high=0.9)
    assert out.values[KEPT].tolist() == pytest.approx([-2 * math.exp(0.2)] * 2 + [math.exp(-0.4)])
    assert gradient == pytest.approx([-2 * math.exp(0.2)] * 2 + [0.0, math.exp(-0.4)])
    # the first response is clipped as a whole, also its second token, whose own ratio exp(0.1) is within the bound
    out, gradient = one_step(gspo, [2.0, 2.0, 2.0, 1.0], clip_low=0.2, clip_high=0.15)
    assert out.values[:2].tolist() == pytest.approx([-2.3] * 2) and gradient[:2] == [0.0, 0.0]
    assert out.clipped.tolist() == [True, True, False, False]


def test_gspo_has_the_gradient_of_the_paper_s_sequence_form():
    trainer = (OLD + SHIFTS).requires_grad_()
    in_tokens = gspo(trainer, OLD, torch.ones(4), KEPT, RESPONSES, clip_low=0.9, clip_high=0.9)
    weights = by_sequence(KEPT, RESPONSES, Totals(num_tokens=3, num_sequences=2, max_tokens=4))
    of_tokens = torch.autograd.grad((weights * in_tokens.values)[KEPT].sum(), trainer)[0]
    first, second = (trainer - OLD)[:2].mean().exp(), (trainer - OLD)[3].exp()  # differentiated through the mean
    torch.testing.assert_close(of_tokens, torch.autograd.grad(-(first + second) / 2, trainer)[0])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    out, gradient = one_step(cispo, [2.0, 2.0, 2.0, -1.0], clip_low=0.2, clip_high=0.2)
    assert gradient == pytest.approx([-2 * 1.2, -2 * math.exp(0.1), 0.0, 0.8])
    assert out.values[KEPT].tolist() == pytest.approx([2.4 * 0.7, 2 * math.exp(0.1) * 1.9, -0.8 * 1.4])
    assert out.clipped.tolist() == [True, False, False, True]
    _, gradient = one_step(cispo, [2.0, 2.0, 2.0, -1.0], clip_low=1.0, clip_high=4.0)
    assert gradient[3] == pytest.approx(math.exp(-0.4))  # no lower bound


def test_sapo_has_the_plain_gradient_at_ratio_one_and_less_far_from_it():
    def weight(ratio, tau):
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return 4 * gate * (1 - gate) * ratio  # by hand: d/dlogp of 4 / tau * sigmoid(tau * (ratio - 1))

    out, gradient = one_step(sapo, [2.0, 2.0, 2.0, -1.0], sapo_positive=1.5, sapo_negative=3.0)
    first, last = math.exp(0.3), math.exp(-0.4)
    assert gradient == pytest.approx([-2 * weight(first, 1.5), -2 * weight(math.exp(0.1), 1.5), 0.0, weight(last, 3.0)])
    assert out.values[3].item() == pytest.approx(4 / 3 / (1 + math.exp(-3 * (last - 1))))
    assert weight(1.0, 1.5) == 1.0 and not out.clipped.any()


def test_reinforce_ignores_the_old_policy():
    out, gradient = one_step(reinforce, [2.0, 2.0, 2.0, -1.0])
    assert gradient == [-2.0, -2.0, 0.0, 1.0]
    assert out.values[KEPT].tolist() == pytest.approx([1.4, 3.8, -1.4])


def test_token_sequence_and_constant_weights():
    # two responses of 3 and 1 trained tokens, one masked token in each
    mask = torch.tensor([True, True, True, False, True, False])
    sequence_ids = torch.tensor([0, 0, 0, 0, 1, 1])
    totals = Totals(num_tokens=4, num_sequences=2, max_tokens=8)
    assert by_token(mask, sequence_ids, totals).tolist() == [0.25, 0.25, 0.25, 0, 0.25, 0]
    assert by_sequence(mask, sequence_ids, totals).tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0, 0.5, 0])
    assert by_constant(mask, sequence_ids, totals).tolist() == [1 / 16, 1 / 16, 1 / 16, 0, 1 / 16, 0]


def test_by_sequence_weighs_each_item_as_slimes_mean_over_samples():
    """slime without --calculate-per-token-loss: of each sample sum(x * mask) / max(sum(mask), 1), summed over all
    micro-batches, over --global-batch-size samples."""
    samples = [([0.5, -1.0, 3.0], [1, 1, 0]), ([2.0], [1]), ([0.25, -4.0, 1.5, 7.0], [1, 1, 1, 1])]
    wanted = [sum(x * m for x, m in zip(*one, strict=True)) / max(sum(one[1]), 1) / len(samples) for one in samples]
    totals = Totals(num_tokens=7, num_sequences=3, max_tokens=8)
    found = []
    for micro_batch in (samples[:2], samples[2:]):
        values = torch.tensor([x for one, _ in micro_batch for x in one])
        mask = torch.tensor([bool(m) for _, one in micro_batch for m in one])
        ids = torch.tensor([number for number, (one, _) in enumerate(micro_batch) for _ in one])
        shares = by_sequence(mask, ids, totals) * values
        found += [shares[ids == number].sum().item() for number in range(len(micro_batch))]
    assert found == pytest.approx(wanted)


def test_kl_estimates_of_a_token_twice_as_likely_as_under_the_reference():
    trainer, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert k1(trainer, reference).item() == pytest.approx(math.log(2))
    assert k2(trainer, reference).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(trainer, reference).item() == pytest.approx(0.5 - 1 + math.log(2))
    assert low_var(trainer, reference).item() == pytest.approx(0.5 - 1 + math.log(2))


def test_low_var_kl_is_at_most_ten_where_k3_explodes():
    trainer, reference = torch.tensor([-40.0], requires_grad=True), torch.tensor([-1.0])
    assert k3(trainer, reference).item() > 1e16
    bounded = low_var(trainer, reference)
    assert bounded.item() == 10.0
    assert torch.autograd.grad(bounded.sum(), trainer)[0].item() == 0.0


# Two responses of two trained tokens each and one masked token; old - sampler is log of the weights 1.5, 3, 0.5, 0.8
SAMPLER = torch.tensor([-1.0, -1.0, -9.0, -1.0, -1.0])
CORRECTED_OLD = SAMPLER + torch.tensor([1.5, 3.0, 7.0, 0.5, 0.8]).log()
CORRECTED_MASK, CORRECTED_IDS = torch.tensor([True, True, False, True, True]), torch.tensor([0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("correction", "bounds", "weights"),
    [
        (truncated, {"floor": 0.0, "cap": 2.0}, [1.5, 2.0, 0.0, 0.5, 0.8]),
        (truncated, {"floor": 0.6, "cap": 2.0}, [1.5, 2.0, 0.0, 0.6, 0.8]),
        (sequence_truncated, {"floor": 0.0, "cap": 2.0}, [2.0, 2.0, 0.0, 0.4, 0.4]),  # products 4.5 and 0.4
        (sequence_truncated, {"floor": 0.5, "cap": 9.0}, [4.5, 4.5, 0.0, 0.5, 0.5]),
        (token_masked, {"floor": 0.6, "cap": 2.0}, [1.5, 0.0, 0.0, 0.0, 0.8]),
        (token_masked, {"floor": 0.0, "cap": 5.0}, [1.5, 3.0, 0.0, 0.5, 0.8]),
        (sequence_masked, {"floor": 0.0, "cap": 2.0}, [0.0, 0.0, 0.0, 0.4, 0.4]),
        (sequence_masked, {"floor": 0.5, "cap": 5.0}, [4.5, 4.5, 0.0, 0.0, 0.0]),
        (geometric_masked, {"floor": 0.7, "cap": 2.2}, [4.5**0.5, 4.5**0.5, 0.0, 0.0, 0.0]),
        (geometric_masked, {"floor": 0.6, "cap": 2.1}, [0.0, 0.0, 0.0, 0.4**0.5, 0.4**0.5]),
    ],
)
def test_importance_weights_of_tokens_and_responses(correction, bounds, weights):
    found = correction(CORRECTED_OLD, SAMPLER, CORRECTED_MASK, CORRECTED_IDS, **bounds)
    assert found.tolist() == pytest.approx(weights, rel=1e-6)


@pytest.mark.parametrize(("veto", "kept"), [(0.5, [1.0] * 5), (0.6, [1, 1, 1, 0, 0]), (2.0, [0.0] * 5)])
def test_one_token_below_the_veto_leaves_its_whole_response_out_and_a_masked_one_does_not(veto, kept):
    assert not_vetoed(CORRECTED_OLD, SAMPLER, CORRECTED_MASK, CORRECTED_IDS, veto=veto).tolist() == kept


def test_opsm_leaves_out_bad_responses_that_the_policy_has_left():
    trainer = SAMPLER - torch.tensor([0.3, 0.1, 50.0, 0.0, 0.3])  # means 0.2 and 0.15 nats a token
    bad, good = torch.full((5,), -1.0), torch.full((5,), 1.0)
    for advantages, limit, kept in (
        (bad, 0.17, [0.0, 0.0, 0.0, 1.0, 1.0]),
        (bad, 0.1, [0.0] * 5),
        (bad, 0.3, [1.0] * 5),
        (good, 0.1, [1.0] * 5),
    ):
        found = off_policy_kept(trainer, SAMPLER, advantages, CORRECTED_MASK, CORRECTED_IDS, limit=limit)
        assert found.tolist() == kept


def test_unbiased_k3_is_the_ratio_times_k3_differentiated_as_it_stands():
    trainer = torch.tensor([-1.0, -2.0], requires_grad=True)
    reference, old = torch.tensor([-1.5, -1.0]), torch.tensor([-0.7, -2.5])
    plain = (trainer - old).exp() * k3(trainer, reference)
    mended = unbiased(k3(trainer, reference), trainer, reference, old)
    torch.testing.assert_close(mended, plain)
    gradients = [torch.autograd.grad(kl.sum(), trainer, retain_graph=True)[0] for kl in (mended, plain)]
    torch.testing.assert_close(*gradients)
