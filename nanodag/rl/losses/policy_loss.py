"""What a policy loss gives.

Contract: `fn(trainer_logprobs, old_logprobs, advantages, mask, sequence_ids, **options) -> PolicyLoss`, with gradient
to trainer_logprobs alone. Of the config's options a function gets those that its signature names: clip_low, clip_high,
dual_clip, sapo_positive, sapo_negative. Where a loss looks at whole responses, every token of a response must be in the
call; packing never splits one.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """values: (T,) float32. ratio: (T,) float32, without gradient: what weighs the token, before any bound. clipped:
    (T,) bool: tokens on which a bound acts."""

    values: Tensor
    ratio: Tensor
    clipped: Tensor
