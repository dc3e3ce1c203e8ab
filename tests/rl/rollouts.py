"""Rollouts as tests need them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nanodag.rl.rollouts.rollout import Rollout, Span, prompt_span


def sampled_span(token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> Span:
    """Sampled tokens of one policy version, all of them trained. Rounding above 0 is taken as 0."""
    ids, size, logprobs = tuple(token_ids), len(token_ids), tuple(min(value, 0.0) for value in logprobs)
    return Span(kind="sampled", token_ids=ids, mask=(1,) * size, logprobs=logprobs, versions=(version,) * size)


def rollout(
    group: str,
    sample: int,
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    reward: float | None = 0.0,
    logprob: float = -2.0,
    versions: Sequence[int] = (),
    **fields: Any,
) -> Rollout:
    """One rollout of one sampled span, all its tokens by version 0 where none are given."""
    span = sampled_span(response, [logprob] * len(response), version=0)
    spans = (prompt_span(prompt), replace(span, versions=tuple(versions)) if versions else span)
    values = {"prompt_id": group, "sample_index": sample, "spans": spans, "finish_reason": "stop", "reward": reward}
    return Rollout(**{"group_id": group, **values, **fields})


def of_versions(versions: Sequence[int], *, reward: float | None = 1.0, sample: int = 0) -> Rollout:
    return rollout("p@0", sample, [1, 2], range(len(versions)), reward=reward, versions=versions, prompt_id="p")


# Six rollouts of three groups, in the order in which they came, no two of one length.
RAGGED = [
    rollout(group, sample, prompt, response, reward=float(sample), logprob=-0.5)
    for group, sample, prompt, response in (
        ("a", 0, [1, 2, 3], [4, 5, 6]),
        ("b", 0, [7], [8]),
        ("a", 1, [1, 2, 3], [9, 10]),
        ("b", 1, [7], [11, 12, 13, 14]),
        ("c", 0, [15, 16, 17, 18, 19], [20, 21]),
        ("a", 2, [1, 2, 3], [22]),
    )
]
