"""What the config takes off a reward before groups are compared. Evaluation never sees it. No torch here."""

from dataclasses import replace

from nanodag.config.kinds.rl import RLStage
from nanodag.rl.rollouts.rollout import Rollout

OVERLONG = "overlong"  # the component that says how much was taken off


def shaped(rollout: Rollout, config: RLStage) -> Rollout:
    """The rollout with the reward that is trained on."""
    if not config.rollout.overlong_buffer:
        return rollout
    return with_overlong_penalty(
        rollout,
        longest=config.rollout.max_new_tokens,
        buffer=config.rollout.overlong_buffer,
        penalty=config.rollout.overlong_penalty,
    )


def with_overlong_penalty(rollout: Rollout, *, longest: int, buffer: int, penalty: float) -> Rollout:
    """Take up to `penalty` off the reward of a response that ends in the last `buffer` tokens before `longest`.

    Nothing up to longest - buffer tokens, then linearly, all of it at longest. Every rollout with a reward gets the
    component `overlong`, 0 or below. Source: DAPO, arXiv:2503.14476, eq. 13; as verl's overlong_buffer and OpenRLHF's.
    """
    if rollout.reward is None:
        return rollout
    beyond = min(max(rollout.num_sampled - (longest - buffer), 0), buffer)
    taken = -penalty * beyond / buffer if beyond else 0.0
    components = {**rollout.reward_components, OVERLONG: taken}
    return replace(rollout, reward=rollout.reward + taken, reward_components=components)
