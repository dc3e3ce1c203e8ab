"""The policy loss of CISPO: the weight is clipped, never the gradient."""

from torch import Tensor

from nanodag.registry import entry
from nanodag.rl.losses.policy_loss import PolicyLoss


@entry("policy_loss", "cispo")
def cispo(
    trainer_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * trainer_logprob, sg for no gradient.

    REINFORCE with a bounded importance weight: no token's gradient is lost. The paper has no lower bound: clip_low of 1
    says that. TRL's `epsilon_high` e is the bound itself: clip_low 1, clip_high e - 1; verl's are ours. log ratio is
    clamped to [-20, 20]. Source: MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5.
    """
    ratio = (trainer_logprobs.detach() - old_logprobs).clamp(-20.0, 20.0).exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(values=-bounded * advantages * trainer_logprobs, ratio=ratio, clipped=(bounded != ratio) & mask)
