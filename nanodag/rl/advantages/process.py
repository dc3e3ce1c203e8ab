"""Process supervision: credit by the scores of single steps of a response."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanodag.rl.advantages.groups import group_statistics
from nanodag.rl.advantages.grpo import EPSILON

Steps = Sequence[tuple[int, float]]
"""Of one response: the place of the token that ends a step, from 0, and the step's score."""


def process_grpo(steps: Sequence[Steps], group_ids: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """A_t = sum of (s - mean) / (std + 1e-6) over the steps of the response that end at token t or after it.

    steps: of each of B responses. group_ids: (B,) int64. sizes: tokens of each. Returns (size,) float32 each. mean and
    std, which is unbiased, are of the scores of all steps of the group, so one with more steps weighs more; where they
    are all equal, and behind its last step, a response gets exactly 0.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.3; epsilon and unbiased std as in `grpo`.
    """
    scores = torch.tensor([score for pairs in steps for _, score in pairs], dtype=torch.float32)
    counts = torch.tensor([len(pairs) for pairs in steps])
    group = group_statistics(scores, group_ids.cpu().repeat_interleave(counts))
    normalised = (group.centred / (group.std + EPSILON)).split(counts.tolist())
    return [_from_the_end(pairs, values, size) for pairs, values, size in zip(steps, normalised, sizes, strict=True)]


def _from_the_end(steps: Steps, values: Tensor, size: int) -> Tensor:
    at_token = torch.zeros(size, dtype=torch.float64)
    at_token.index_add_(0, torch.tensor([place for place, _ in steps], dtype=torch.int64), values)
    return at_token.flip(0).cumsum(0).flip(0).float()


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
