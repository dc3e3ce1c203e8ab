"""Rewards and `generate` functions that fail for some samples: the message, and the limit. No torch here."""

import logging
from collections.abc import Sequence

from nanodag.errors import StageFailed
from nanodag.errors.words import counted
from nanodag.rl.rollouts.rollout import Rollout, main_sequences

log = logging.getLogger(__name__)

WARNED_ABOVE = 0.01
REASON = "reward_error"  # the metadata that says why there is no reward
FAILED = "generate_error"  # and why there is no response
LAST_WORDS = "last_words"  # and the last lines that what failed has written, where there are any


def has_failed_reward(rollout: Rollout) -> bool:
    """Whether there is a response, and no reward of it."""
    return rollout.reward is None and rollout.finish_reason != "error"


def check_failures(rollouts: Sequence[Rollout], *, of: str, max_failed_rewards: float) -> None:
    """Warn, once for each function, when it failed for more than WARNED_ABOVE of the samples.

    of: what they were sampled for, as in `step 3`. Raises StageFailed when more than max_failed_rewards of the samples
    or of the rewards failed, or all of them.
    """
    rollouts = main_sequences(rollouts)
    broken = [rollout for rollout in rollouts if rollout.finish_reason == "error"]
    answered = [rollout for rollout in rollouts if rollout.finish_reason != "error"]
    failed = [rollout for rollout in answered if has_failed_reward(rollout)]
    if broken:
        reason, words = str(broken[0].metadata[FAILED]), str(broken[0].metadata.get(LAST_WORDS, ""))
        reason += f"; its last words: {' | '.join(words.splitlines())}" if words else ""
        message = _said("function that generates", broken, rollouts, of=of, reason=reason)
        share = len(broken) / len(rollouts)
        if share > max_failed_rewards or not answered:
            raise StageFailed(
                f"{message} The limit is max_failed_rewards {max_failed_rewards:g}, and all is always too many. Repair "
                "it, raise generate.timeout_s, or raise max_failed_rewards."
            )
        _warn(message, share)
    if failed:
        share = len(failed) / len(answered)
        message = _said("reward", failed, answered, of=of, reason=str(failed[0].metadata.get(REASON)))
        if share > max_failed_rewards or share == 1.0:
            raise StageFailed(
                f"{message} The limit is max_failed_rewards {max_failed_rewards:g}, and all is always too many. Repair "
                "the reward function and start the stage again, raise reward_timeout_s, or raise max_failed_rewards."
            )
        _warn(message, share)


def _said(what: str, failed: Sequence[Rollout], tried: Sequence[Rollout], *, of: str, reason: str) -> str:
    share = f"{len(failed)} of {counted(len(tried), 'sample')} of {of} ({len(failed) / len(tried):.1%})"
    return f"The {what} failed for {share}. The first reason: {reason.rstrip('.')}."


def _warn(said: str, share: float) -> None:
    if share > WARNED_ABOVE:
        log.warning("%s These samples are left out.", said)
