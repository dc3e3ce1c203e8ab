"""Filters: which groups are trained on, and the penalty that the config takes off a reward before groups are compared,
which evaluation never sees. No torch here.

Contract of a filter: `fn(group, **options) -> reason | None`: None keeps the group, a short word drops it, and drops
are counted by that word. group: the members whose reward is known, at least two unless `samples_per_prompt` is 1.
Options are numbers from the config, keyword only.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from nanodag.config.rl_sections import RolloutSection
from nanodag.registry import entry
from nanodag.rl.rollouts.rollout import Rollout, reward_spread

OVERLONG = "overlong"  # the component that says how much was taken off


@entry("filter", "nonzero_spread")
def nonzero_spread(group: Sequence[Rollout]) -> str | None:
    """Drops a group whose rewards are all equal: every advantage is 0, so it teaches nothing (DAPO's dynamic sampling,
    arXiv:2503.14476, eq. 11)."""
    return None if reward_spread(group) > 0.0 else "zero_spread"


@entry("filter", "mean_reward")
def mean_reward(group: Sequence[Rollout], *, lowest: float = -math.inf, highest: float = math.inf) -> str | None:
    """Drops a group whose mean reward is below lowest or above highest: too hard, or too easy, to learn from."""
    mean = fmean(member.reward for member in group if member.reward is not None)
    if mean < lowest:
        return "reward_too_low"
    return "reward_too_high" if mean > highest else None


@entry("filter", "length")
def length(
    group: Sequence[Rollout], *, lowest: float = 0, highest: float = math.inf, truncated: float = 1.0
) -> str | None:
    """Drops a group whose mean response has fewer than lowest or more than highest tokens, or of which more than the
    share `truncated` was cut off."""
    mean = fmean(member.num_sampled for member in group)
    if mean < lowest:
        return "too_short"
    if mean > highest:
        return "too_long"
    share = fmean(member.finish_reason == "length" for member in group)
    return "truncated" if share > truncated else None


@entry("filter", "diversity")
def diversity(group: Sequence[Rollout], *, lowest: float) -> str | None:
    """Drops a group in which fewer than the share `lowest` of responses are different from one another, token by
    token."""
    different = len({member.response_token_ids for member in group})
    return None if different / len(group) >= lowest else "not_diverse"


def shaped(rollout: Rollout, section: RolloutSection) -> Rollout:
    """The rollout with the reward that is trained on: up to `overlong_penalty` is taken off that of a response which
    ends in the last `overlong_buffer` tokens before max_new_tokens.

    Nothing before these, then linearly, all of it at max_new_tokens. Every rollout with a reward gets the component
    `overlong`, 0 or below. Source: DAPO, arXiv:2503.14476, eq. 13; as verl's overlong_buffer and OpenRLHF's.
    """
    buffer = section.overlong_buffer
    if not buffer or rollout.reward is None:
        return rollout
    beyond = min(max(rollout.num_sampled - (section.max_new_tokens - buffer), 0), buffer)
    taken = -section.overlong_penalty * beyond / buffer if beyond else 0.0
    components = {**rollout.reward_components, OVERLONG: taken}
    return replace(rollout, reward=rollout.reward + taken, reward_components=components)
