"""How old the weights are that sampled a token, and the cap on it. No torch here.

The staleness of a token that step k trains is the number of steps that changed the weights after those which sampled it
and before step k began. With `updates_per_step` above 1 a step makes several versions and still counts as one; a step
that trained nothing made none and does not count.
"""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from nanodag.errors import StageFailed
from nanodag.rl.rollouts.batch import Dropped, RolloutBatch
from nanodag.rl.rollouts.rollout import Rollout, Span

TOO_STALE = "too_stale"


def staleness_of(version: int, versions: Sequence[int]) -> int:
    """versions: those at the ends of the last steps that changed the weights, ascending, the current one last.

    Raises StageFailed for a version that the trainer has not reached.
    """
    if version > versions[-1]:
        raise StageFailed(
            f"A token says that weights of version {version} sampled it; the trainer is at version {versions[-1]}. The "
            "samplers got their weights from somebody else."
        )
    return sum(later > version for later in versions)


def without_stale(batch: RolloutBatch, versions: Sequence[int], *, largest: int) -> RolloutBatch:
    """The batch with every sampled token of a staleness above `largest` masked, so that it is never trained; a group
    without any token left is dropped as `too_stale`.

    The schedule keeps to the cap, so this finds something only in partial rollouts that went through several
    steps, or when a sampler had other weights than it was given.
    """
    return _without(batch, lambda version: staleness_of(version, versions) > largest)


def without_older(batch: RolloutBatch) -> RolloutBatch:
    """The batch with every sampled token masked that weights older than the newest in it sampled: those of earlier
    steps, in partial rollouts. A group without any token left is dropped as `too_stale`."""
    newest = max((version for rollout in batch.all_rollouts for version in rollout.versions), default=0)
    return _without(batch, lambda version: version < newest)


def _without(batch: RolloutBatch, is_old: Callable[[int], bool]) -> RolloutBatch:
    found = {version for rollout in batch.trained for version in rollout.versions}
    old = frozenset(filter(is_old, found))
    if not old:
        return batch
    kept, dropped = [], list(batch.dropped)
    for prompt, group in batch.kept:
        masked = [_masked(rollout, old) for rollout in group]
        if any(any(span.mask) for rollout in masked for span in rollout.spans):
            kept.append((prompt, masked))
        else:
            dropped.append(Dropped(prompt, masked, TOO_STALE))
    return replace(batch, kept=kept, dropped=dropped)


def staleness_metrics(rollouts: Sequence[Rollout], versions: Sequence[int]) -> dict[str, float]:
    """Over the tokens that are trained: mean and largest staleness, in steps. masked_tokens: sampled tokens that are
    not."""
    num_tokens = Counter[tuple[int, int]]()  # by version and mask: of these there are few
    for rollout in rollouts:
        for span in rollout.spans:
            num_tokens.update(zip(span.versions, span.mask, strict=True))
    found = [(staleness_of(version, versions), count) for (version, mask), count in num_tokens.items() if mask]
    num_trained = sum(count for _, count in found)
    return {
        "staleness": sum(steps * count for steps, count in found) / max(num_trained, 1),
        "staleness_largest": float(max((steps for steps, _ in found), default=0)),
        "masked_tokens": float(num_tokens.total() - num_trained),
    }


def _masked(rollout: Rollout, old: Container[int]) -> Rollout:
    return replace(rollout, spans=tuple(_masked_span(span, old) for span in rollout.spans))


def _masked_span(span: Span, old: Container[int]) -> Span:
    pairs = zip(span.mask, span.versions, strict=True)
    return replace(span, mask=tuple(0 if version in old else mask for mask, version in pairs))
