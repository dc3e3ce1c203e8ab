"""The advantage of PPO: generalised advantage estimation, from a critic's values."""

import torch
from torch import Tensor

from nanodag.registry import entry


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
