"""How token losses become one number: each entry gives the weight of every token.

Contract: `fn(mask, sequence_ids, totals) -> weights` (T,) float32, 0 where the mask is False. The loss of an update is
the sum of weight * token loss over all its tokens, wherever they are computed.
"""

from dataclasses import dataclass

from torch import Tensor

from nanodag.registry import entry
from nanodag.rl.losses.sequences import sequence_sums


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over one whole update: every rank and every micro-batch.

    num_tokens: trained tokens. num_sequences: responses with at least one trained token; a fully masked response is
    not counted (as in verl and OpenRLHF; TRL counts it). max_tokens: longest response that the config allows.
    """

    num_tokens: int
    num_sequences: int
    max_tokens: int


@entry("aggregation", "token")
def by_token(mask: Tensor, sequence_ids: Tensor, totals: Totals) -> Tensor:
    """w = 1 / num_tokens: every token counts the same, so long responses count more.

    Source: DAPO, arXiv:2503.14476, eq. 12.
    """
    return mask.float() / max(totals.num_tokens, 1)


@entry("aggregation", "sequence")
def by_sequence(mask: Tensor, sequence_ids: Tensor, totals: Totals) -> Tensor:
    """w = 1 / (num_sequences * trained tokens of the response): every response counts the same.

    A response must lie in one micro-batch. Source: DeepSeekMath, arXiv:2402.03300, eq. 3.
    """
    lengths = sequence_sums(mask.float(), mask, sequence_ids)
    return mask.float() / (lengths[sequence_ids].clamp(min=1.0) * max(totals.num_sequences, 1))


@entry("aggregation", "constant")
def by_constant(mask: Tensor, sequence_ids: Tensor, totals: Totals) -> Tensor:
    """w = 1 / (num_sequences * max_tokens): no length in the denominator, so none is favoured.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.1; TRL's loss_type="dr_grpo".
    """
    return mask.float() / (max(totals.num_sequences, 1) * totals.max_tokens)
