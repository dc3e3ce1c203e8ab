"""Six rollouts of three groups, in the order in which they came, no two of one length."""

from nanodag.rl.rollouts.rollout import Rollout, prompt_span, sampled_span


def rollout(group: str, sample: int, prompt: list[int], response: list[int]) -> Rollout:
    return Rollout(
        group_id=group,
        prompt_id=group,
        sample_index=sample,
        spans=(prompt_span(prompt), sampled_span(response, [-0.5] * len(response), version=0)),
        finish_reason="stop",
        reward=float(sample),
    )


RAGGED = [
    rollout("a", 0, [1, 2, 3], [4, 5, 6]),
    rollout("b", 0, [7], [8]),
    rollout("a", 1, [1, 2, 3], [9, 10]),
    rollout("b", 1, [7], [11, 12, 13, 14]),
    rollout("c", 0, [15, 16, 17, 18, 19], [20, 21]),
    rollout("a", 2, [1, 2, 3], [22]),
]
