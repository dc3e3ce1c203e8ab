"""A rollout by the policy versions of its tokens."""

from nanodag.rl.rollouts.rollout import Rollout, Span, prompt_span


def rollout(versions: list[int], *, reward: float | None = 1.0, sample: int = 0) -> Rollout:
    size = len(versions)
    sampled = Span(
        kind="sampled",
        token_ids=tuple(range(size)),
        mask=(1,) * size,
        logprobs=(-0.1,) * size,
        versions=tuple(versions),
    )
    return Rollout(
        group_id="p@0",
        prompt_id="p",
        sample_index=sample,
        spans=(prompt_span([1, 2]), sampled),
        finish_reason="stop",
        reward=reward,
    )
