"""Groups of earlier steps that are trained again, beside fresh ones (`rollout.replay`). No torch here.

A step takes `rollout.num_replayed` of the groups that earlier steps trained as fresh ones. Which, follows from the
stage's seed and the step. Groups whose oldest trained token would be more than `replay.max_staleness` steps old are
forgotten. A checkpoint holds what is kept.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nanodag.config.kinds.rl import RLStage
from nanodag.inference.seeds import derived_seed
from nanodag.rl.rollouts.batch import RolloutBatch, staleness_metrics, staleness_of
from nanodag.rl.rollouts.prompts import Prompt
from nanodag.rl.rollouts.rollout import REPLAYED, Rollout, from_json, to_json
from nanodag.store.atomic import write_bytes

FILE = "replay.jsonl"


@dataclass(frozen=True, slots=True)
class _Kept:
    """A group that a step trained. rollouts: as JSON lines, a third of what objects take. oldest: the version of the
    oldest weights that sampled a trained token."""

    step: int
    oldest: int
    epoch: int
    record: Mapping[str, Any]
    rollouts: tuple[str, ...]

    @property
    def group_id(self) -> str:
        return f"{self.record['prompt_id']}@{self.epoch}"

    def group(self) -> tuple[Prompt, list[Rollout]]:
        """The prompt, and the rollouts with the step that trained them first."""
        rollouts = [from_json(line) for line in self.rollouts]
        marked = [replace(rollout, metadata={**rollout.metadata, REPLAYED: self.step}) for rollout in rollouts]
        return Prompt(epoch=self.epoch, record=self.record, token_ids=marked[0].prompt_token_ids), marked


class ReplayBuffer:
    """The groups that one stage keeps; none without `replay`."""

    def __init__(self, config: RLStage) -> None:
        self._seed = int(config.seed)
        self._size, self._cap = config.rollout.num_replayed, config.rollout.replay.max_staleness
        self._kept: list[_Kept] = []

    def with_replayed(self, step: int, batch: RolloutBatch, versions: Sequence[int]) -> RolloutBatch:
        """A step's rollout batch with groups of earlier steps among the fresh ones, so that each update of the step
        has its share of them. versions: as `staleness_of` takes them."""
        fresh_enough = [kept for kept in self._kept if staleness_of(kept.oldest, versions) <= self._cap]
        drawn = sorted(fresh_enough, key=lambda kept: derived_seed(self._seed, "replay", step, kept.group_id))
        replayed = [kept.group() for kept in drawn[: self._size]]
        mixed, gap = list(batch.kept), len(batch.kept) / max(1, len(replayed))
        for number in reversed(range(len(replayed))):
            mixed.insert(round((number + 1) * gap), replayed[number])
        return replace(batch, kept=mixed)

    def keep(self, step: int, fresh: RolloutBatch, versions: Sequence[int]) -> None:
        """Remember what a step trained as fresh, forget what the next one may not train. versions: after the step."""
        if not self._size:
            return
        new = []
        for prompt, group in fresh.kept:
            spans = [span for rollout in group for span in rollout.spans]
            if trained := [v for span in spans for v, mask in zip(span.versions, span.mask, strict=True) if mask]:
                rollouts = tuple(map(to_json, group))
                new.append(_Kept(step, min(trained), prompt.epoch, dict(prompt.record), rollouts))
        self._kept = [kept for kept in (*self._kept, *new) if staleness_of(kept.oldest, versions) <= self._cap]

    def save(self, folder: Path) -> None:
        """Write what is kept into a checkpoint."""
        if self._size:
            write_bytes(folder / FILE, "".join(json.dumps(asdict(kept)) + "\n" for kept in self._kept).encode())

    def load(self, folder: Path) -> None:
        """Keep what a checkpoint has."""
        if self._size:
            lines = map(json.loads, (folder / FILE).read_text(encoding="utf-8").splitlines())
            self._kept = [_Kept(**line | {"rollouts": tuple(line["rollouts"])}) for line in lines]


def replay_metrics(batch: RolloutBatch, versions: Sequence[int]) -> dict[str, float]:
    """Metrics of a step's replayed groups: how many, their share, mean and largest staleness of their trained tokens,
    in steps. Empty where there is none."""
    replayed = [rollout for rollout in batch.trained if REPLAYED in rollout.metadata]
    if not replayed:
        return {}
    num_groups = len({rollout.group_id for rollout in replayed})
    ages = staleness_metrics(replayed, versions)
    return {
        "replayed_groups": float(num_groups),
        "replayed_share": num_groups / len(batch.kept),
        "replayed_staleness": ages["staleness"],
        "replayed_staleness_largest": ages["staleness_largest"],
    }
