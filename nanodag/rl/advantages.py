"""Advantages: how much better than others a rollout was.

Contract of an entry: `fn(rewards, group_ids, num_tokens) -> advantages`, all (B,): float32, int64, int64, float32.
num_tokens: trained tokens of each rollout. B is every rollout of the step, on every rank. Members of a group need not
be adjacent and groups may differ in size. When all rewards of the batch are equal, every advantage is exactly 0. Within
a group a higher reward never gets a lower advantage.

Entries that look at one group at a time (`grpo`, `dr_grpo`, `rloo`) give exactly 0 to each group whose rewards are all
equal, one of a single member included: it carries no signal. Those that normalise over the batch
(`reinforce_pp`, `reinforce_pp_baseline`) do not.

`gae` has a contract of its own, a number a token. So has `grpo` over a process reward, which scores single steps of a
response (`process_grpo`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanodag.registry import entry

EPSILON = 1e-6
LOWEST = -30.0  # of a teacher's log-probabilities
Steps = Sequence[tuple[int, float]]
"""Of one response: the place of the token that ends a step, from 0, and the step's score."""


def group_statistics(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per sample, (B,) each: members of its group, int64; its reward minus the group's mean, float64; and the group's
    standard deviation, float64, unbiased, 0 for a group of one. The last two are exactly 0 where all rewards of the
    group are equal. rewards: (B,) float32; group_ids: (B,) int64, any values, in any order.

    In float64: there the sum of up to 2^29 equal float32 numbers is exact, so their mean is that number, and what is
    equal gives exactly 0. In float32 the mean of three rewards of 0.1 is not 0.1, and that rounding error over a tiny
    standard deviation would be an advantage made out of nothing.
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be (B,)")
    _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    exact = rewards.float().double()

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(counts.shape).index_add_(0, index, values)

    centred = exact - (summed(exact) / counts)[index]
    variance = summed(centred.square()) / (counts - 1).clamp(min=1)
    return counts[index], centred, variance.sqrt()[index]


def whitened(values: Tensor, num_tokens: Tensor) -> Tensor:
    """(v - mean) / sqrt(variance + 1e-8), both over tokens: the value of a rollout counts once for each trained token.

    values: (B,) float64, exact float32 numbers or differences of them; num_tokens: (B,) int64. The variance is unbiased
    (divided by tokens - 1). Equal values give exactly 0: in float64 the sum of up to 2^29 equal float32 numbers is
    exact. Source: verl's masked_whiten over a matrix that repeats the value; OpenRLHF divides by tokens and takes
    max(variance, 1e-8).
    """
    weights = num_tokens.double()
    total = weights.sum().clamp(min=1.0)
    centred = values - (weights * values).sum() / total
    variance = (weights * centred.square()).sum() / (total - 1.0).clamp(min=1.0)
    return centred / (variance + 1e-8).sqrt()


@entry("advantage", "grpo", compares_groups=True, takes_steps=True)
def grpo(rewards: Tensor, group_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """A_i = (r_i - mean(group)) / (std(group) + 1e-6), std unbiased (divided by n - 1).

    Source: DeepSeekMath, arXiv:2402.03300, eq. 4. epsilon as in verl (TRL 1e-4, OpenRLHF 1e-9); all three use the
    unbiased standard deviation.
    """
    _, centred, std = group_statistics(rewards, group_ids)
    return (centred / (std + EPSILON)).float()


@entry("advantage", "dr_grpo", compares_groups=True)
def dr_grpo(rewards: Tensor, group_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """A_i = r_i - mean(group): not divided by the standard deviation, which favours very easy and very hard prompts.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.1. Its loss divides by a constant instead of by lengths: choose the
    aggregation `constant` with it.
    """
    return group_statistics(rewards, group_ids)[1].float()


@entry("advantage", "rloo", compares_groups=True)
def rloo(rewards: Tensor, group_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """A_i = r_i - mean of the other members = n / (n - 1) * (r_i - mean(group)).

    Source: RLOO, arXiv:2402.14740, section 2.3.
    """
    size, centred, _ = group_statistics(rewards, group_ids)
    return (centred * size / (size - 1).clamp(min=1)).float()


@entry("advantage", "reinforce_pp")
def reinforce_pp(rewards: Tensor, group_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """A_i = (r_i - mean) / std, over the tokens of the whole batch; groups play no part.

    A group whose rewards are all equal carries a signal here, so the filter `nonzero_spread` takes data away. Source:
    REINFORCE++, arXiv:2501.03262, section 3, without discount; verl's `reinforce_plus_plus`, OpenRLHF's `reinforce`.
    KL goes into r_i as a sum over the response, not token by token.
    """
    return whitened(rewards.float().double(), num_tokens).float()


@entry("advantage", "reinforce_pp_baseline", compares_groups=True)
def reinforce_pp_baseline(rewards: Tensor, group_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """A_i = (d_i - mean) / std over the tokens of the whole batch, d_i = r_i - mean(group).

    Where lengths differ, the mean of d over tokens is not 0, so a group without spread gets a little of it. Source:
    REINFORCE++, arXiv:2501.03262, section 3; verl's `reinforce_plus_plus_baseline`, OpenRLHF's `reinforce_baseline`.
    """
    return whitened(group_statistics(rewards, group_ids)[1], num_tokens).float()


@entry("advantage", "gae", takes_steps=True, needs_critic=True)
@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, sequence_ids: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each token, (N,) float64 both, 0 where the mask is False.

        d_t = r_t + gamma * V_t+1 - V_t
        A_t = d_t + gamma * gae_lambda * A_t+1        R_t = A_t + V_t

    rewards, values: (N,). mask: (N,) bool, trained. sequence_ids: (N,) int64; tokens of a response lie together. V_t is
    the value before token t was sampled, and 0 after the last. t + 1 is the next trained token of the same response:
    what a tool said is passed over, as if it were part of what the next token is sampled from (as in verl).

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; verl's compute_gae_advantage_return before it whitens.
    """
    by_token = torch.zeros(2, len(mask), dtype=torch.float64, device=mask.device)
    chosen = mask.nonzero().squeeze(1)
    if not len(chosen):
        return by_token[0], by_token[1]
    response = sequence_ids[chosen]
    counts = torch.bincount(response)
    place = torch.arange(len(chosen), device=mask.device) - (counts.cumsum(0) - counts)[response]
    by_response = rewards.new_zeros(2, len(counts), int(counts.max()), dtype=torch.float64)
    by_response[:, response, place] = torch.stack([rewards[chosen], values[chosen]]).double()
    reward, value = by_response
    advantages = torch.zeros_like(reward)
    following = advantage = torch.zeros_like(reward[:, 0])
    for step in reversed(range(reward.shape[1])):  # behind the end of a response everything is 0
        advantage = reward[:, step] + gamma * following - value[:, step] + gamma * gae_lambda * advantage
        advantages[:, step] = advantage
        following = value[:, step]
    by_token[0, chosen] = advantages[response, place]
    by_token[1, chosen] = (advantages + value)[response, place]
    return by_token[0], by_token[1]


def reward_of_last(rewards: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """(N,): the reward of a response, one of (R,), at its last trained token, 0 elsewhere."""
    places = torch.arange(len(mask), device=mask.device)
    last = places.new_full((len(rewards),), -1).scatter_reduce(0, sequence_ids[mask], places[mask], "amax")
    token_rewards = rewards.new_zeros(len(mask))
    token_rewards[last[last >= 0]] = rewards[last >= 0]
    return token_rewards


# Process rewards: credit by the scores of single steps of a response


def process_grpo(steps: Sequence[Steps], group_ids: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """A_t = sum of (s - mean) / (std + 1e-6) over the steps of the response that end at token t or after it.

    steps: of each of B responses. group_ids: (B,) int64. sizes: tokens of each. Returns (size,) float32 each. mean and
    std, which is unbiased, are of the scores of all steps of the group, so one with more steps weighs more; where they
    are all equal, and behind its last step, a response gets exactly 0.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.3; epsilon and unbiased std as in `grpo`.
    """
    scores = torch.tensor([score for pairs in steps for _, score in pairs], dtype=torch.float32)
    counts = torch.tensor([len(pairs) for pairs in steps])
    _, centred, std = group_statistics(scores, group_ids.cpu().repeat_interleave(counts))
    normalised = (centred / (std + EPSILON)).split(counts.tolist())
    advantages = []
    for pairs, values, size in zip(steps, normalised, sizes, strict=True):
        at_token = torch.zeros(size, dtype=torch.float64)
        at_token.index_add_(0, torch.tensor([place for place, _ in pairs], dtype=torch.int64), values)
        advantages.append(at_token.flip(0).cumsum(0).flip(0).float())
    return advantages


def step_rewards(steps: Sequence[Steps], mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """The score of each step at the token that ends it, (N,) float64; where that is not trained, at the last trained
    token of the response before it, and nowhere when there is none.

    steps: of each of R responses. mask: (N,) bool. sequence_ids: (N,) int64, 0 to R - 1 in order.
    """
    rewards = torch.zeros(len(mask), dtype=torch.float64)
    starts = torch.bincount(sequence_ids, minlength=len(steps)).cumsum(0).tolist()
    is_trained = mask.tolist()
    for pairs, start in zip(steps, [0, *starts], strict=False):
        for place, score in pairs:
            end = next((token for token in range(start + place, start - 1, -1) if is_trained[token]), None)
            if end is not None:
                rewards[end] += score
    return rewards.to(mask.device)


# On-policy distillation: a teacher's opinion of each token, beside the reward of the response


@torch.no_grad()
def distilled(
    advantages: Tensor, old_logprobs: Tensor, teacher_logprobs: Tensor, *, coefficient: float
) -> tuple[Tensor, Tensor]:
    """A_t - coefficient * k_t, and k_t = old_t - teacher_t, (N,) float32 each.

    k_t is the one-sample estimate of KL(policy || teacher) at token t, the reverse KL: on policy, the policy gradient
    of -k_t descends it, token by token, without looking at what k_t does to later tokens (a discount of 0). A
    negligible chance that the teacher gives a token counts as exp(-30), so that one token cannot outweigh all others.

    It is added after advantages were normalised, so the coefficient does not depend on the spread of rewards.

    Source: MiniLLM, arXiv:2306.08543 (the reverse KL, on samples of the student); in the advantage, token by token, as
    in K. Lu and Thinking Machines, "On-policy distillation", 2025, and slime's --use-opd.
    """
    reverse_kl = old_logprobs - teacher_logprobs.clamp(min=LOWEST)
    return advantages - coefficient * reverse_kl, reverse_kl
