"""Rollouts of one step: groups to train on, and groups that were left out with the reason. No torch here.

It may be generated steps before it is trained, so a checkpoint holds those that wait: one JSON object each, in
which a rollout is a line of nanodag.rl.rollouts.rollout.
"""

import json
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from nanodag.errors import StageFailed
from nanodag.rl.rollouts.prompts import Prompt
from nanodag.rl.rollouts.rollout import Rollout, Span, from_json, groups_of, place_in_group, to_json
from nanodag.store.atomic import write_json

TOO_STALE = "too_stale"
Line = Annotated[Rollout, PlainSerializer(to_json), PlainValidator(from_json)]
"""A rollout, a line of nanodag.rl.rollouts.rollout in a file of a batch."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that is not trained on. num_kept_before: how many groups were kept when it was judged."""

    prompt: Prompt
    rollouts: list[Line]
    reason: str
    num_kept_before: int = 0


@dataclass(slots=True)
class RolloutBatch:
    """Rollouts generated for one step.

    kept: groups to train on, in prompt order, without members whose reward failed, which are in `failed`; dropped: the
    other groups that were judged; passed_over: prompts that were not tried, with the reason; num_partial: groups that
    go on in the next step; seconds: it took; pool: metrics of the pool that it was taken from, if any.
    """

    kept: list[tuple[Prompt, list[Line]]] = field(default_factory=list)
    failed: list[Line] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    passed_over: list[tuple[Prompt, str]] = field(default_factory=list)
    num_partial: int = 0
    seconds: float = 0.0
    pool: Mapping[str, float] = field(default_factory=dict)

    @property
    def prompts(self) -> list[Prompt]:
        return [prompt for prompt, _ in self.kept] + [drop.prompt for drop in self.dropped]

    @property
    def trained(self) -> list[Rollout]:
        return [rollout for _, group in self.kept for rollout in group]

    @property
    def untrained(self) -> list[Rollout]:
        return self.failed + [rollout for drop in self.dropped for rollout in drop.rollouts]

    @property
    def all_rollouts(self) -> list[Rollout]:
        return self.trained + self.untrained

    def in_order(self) -> list[tuple[Prompt, list[Rollout]]]:
        """Every group that was judged, whole, in the order of judgement."""
        missing = groups_of(self.failed)
        kept: list[tuple[Prompt, list[Rollout]]] = [
            (prompt, sorted([*group, *missing.get(prompt.group_id, [])], key=place_in_group))
            for prompt, group in self.kept
        ]
        for place, drop in enumerate(self.dropped):  # each before it has moved those behind it by one
            kept.insert(drop.num_kept_before + place, (drop.prompt, drop.rollouts))
        return kept


_BATCH = TypeAdapter(RolloutBatch)


def write_batch(path: Path, batch: RolloutBatch) -> None:
    """Write a rollout batch that waits to be trained on."""
    write_json(path, _BATCH.dump_python(batch, mode="json"))


def read_batch(path: Path) -> RolloutBatch:
    """Read what `write_batch` wrote, bit for bit. Raises StageFailed for the file of another version."""
    record = json.loads(path.read_text(encoding="utf-8"))
    try:
        if record.keys() != {part.name for part in fields(RolloutBatch)}:
            raise ValueError(f"it has {', '.join(record)}")
        return _BATCH.validate_python(record)
    except ValueError as error:  # pydantic's are some
        raise StageFailed(
            f"{path} holds rollouts as another version of nanodag wrote them ({error}). Remove the stage's checkpoints "
            "to begin it again."
        ) from error


# Staleness. A token that step k trains was sampled with some weights. Its staleness is the number of steps before k
# that changed the weights since. With `updates_per_step` above 1 a step makes several versions and still counts as one;
# a step that trained nothing made none and does not count.


def staleness_of(version: int, versions: Sequence[int]) -> int:
    """versions: those at the ends of the last steps that changed the weights, ascending, the current one last. Raises
    StageFailed for a version that the trainer has not reached."""
    if version > versions[-1]:
        raise StageFailed(
            f"A token says that weights of version {version} sampled it; the trainer is at version {versions[-1]}. The "
            "samplers got their weights from somebody else."
        )
    return sum(later > version for later in versions)


def without_stale(batch: RolloutBatch, versions: Sequence[int], *, largest: int) -> RolloutBatch:
    """The batch with every sampled token of a staleness above `largest` masked, so that it is never trained; a group
    without any token left is dropped as `too_stale`. The schedule keeps to the cap. So this masks something only in
    partial rollouts of several steps, or when a sampler had other weights than it was given."""
    return _without(batch, lambda version: staleness_of(version, versions) > largest)


def without_older(batch: RolloutBatch) -> RolloutBatch:
    """The batch with every sampled token masked that weights older than the newest in it sampled: those of earlier
    steps, in partial rollouts. A group without any token left is dropped as `too_stale`."""
    newest = max((version for rollout in batch.all_rollouts for version in rollout.versions), default=0)
    return _without(batch, lambda version: version < newest)


def _without(batch: RolloutBatch, is_old: Callable[[int], bool]) -> RolloutBatch:
    old = set(filter(is_old, set[int]().union(*(span.versions for one in batch.trained for span in one.spans))))
    if not old:
        return batch
    kept, dropped = [], list(batch.dropped)
    for prompt, group in batch.kept:
        masked = [replace(rollout, spans=tuple(_masked(span, old) for span in rollout.spans)) for rollout in group]
        if any(any(span.mask) for rollout in masked for span in rollout.spans):
            kept.append((prompt, masked))
        else:
            dropped.append(Dropped(prompt, masked, TOO_STALE))
    return replace(batch, kept=kept, dropped=dropped)


def staleness_metrics(rollouts: Sequence[Rollout], versions: Sequence[int]) -> dict[str, float]:
    """Over the tokens that are trained: mean and largest staleness, in steps. masked_tokens: sampled tokens that are
    not."""
    num_tokens = Counter[tuple[int, int]]()  # by version and mask: of these there are few
    for span in (span for rollout in rollouts for span in rollout.spans if span.versions):
        if len(versions_of := set(span.versions)) == 1 and all(span.mask):  # nearly always
            num_tokens[versions_of.pop(), 1] += len(span.mask)
        else:
            num_tokens.update(zip(span.versions, span.mask, strict=True))
    trained = [(staleness_of(version, versions), count) for (version, mask), count in num_tokens.items() if mask]
    num_trained = sum(count for _, count in trained)
    return {
        "staleness": sum(steps * count for steps, count in trained) / max(num_trained, 1),
        "staleness_largest": float(max((steps for steps, _ in trained), default=0)),
        "masked_tokens": float(num_tokens.total() - num_trained),
    }


def _masked(span: Span, old: Container[int]) -> Span:
    pairs = zip(span.mask, span.versions, strict=True)
    return replace(span, mask=tuple(0 if version in old else mask for mask, version in pairs))
