"""What the samplers made for one step: groups to train on, and what was left out with its reason. No torch here.

It may be generated steps before it is trained, so a checkpoint holds those that wait: one JSON object each, in
which a rollout is a line of nanodag.rl.rollouts.rollout.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanodag.rl.rollouts.prompts import Prompt
from nanodag.rl.rollouts.rollout import Rollout, from_json, groups_of, place_in_group, to_json
from nanodag.store.atomic import write_json


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that is not trained on. num_kept_before: how many groups were kept when it was judged."""

    prompt: Prompt
    rollouts: list[Rollout]
    reason: str
    num_kept_before: int = 0


@dataclass(slots=True)
class RolloutBatch:
    """What was generated for one step.

    kept: groups to train on, in prompt order, without members whose reward failed, which are in `failed`; dropped: the
    other groups that were judged; passed_over: prompts that were not tried, with the reason; num_partial: groups that
    go on in the next step; seconds: it took; pool: metrics of the pool that it was taken from, if any.
    """

    kept: list[tuple[Prompt, list[Rollout]]] = field(default_factory=list)
    failed: list[Rollout] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    passed_over: list[tuple[Prompt, str]] = field(default_factory=list)
    num_partial: int = 0
    seconds: float = 0.0
    pool: Mapping[str, float] = field(default_factory=dict)

    @property
    def prompts(self) -> list[Prompt]:
        """Every prompt that was judged."""
        return [prompt for prompt, _ in self.kept] + [drop.prompt for drop in self.dropped]

    @property
    def trained(self) -> list[Rollout]:
        return [rollout for _, group in self.kept for rollout in group]

    @property
    def untrained(self) -> list[Rollout]:
        return self.failed + [rollout for drop in self.dropped for rollout in drop.rollouts]

    @property
    def all_rollouts(self) -> list[Rollout]:
        """Every rollout that was judged."""
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


def write_batch(path: Path, batch: RolloutBatch) -> None:
    """Write a rollout batch that waits to be trained on."""
    write_json(
        path,
        {
            "kept": [{"prompt": _prompt_record(p), "rollouts": _rollout_records(group)} for p, group in batch.kept],
            "failed": _rollout_records(batch.failed),
            "dropped": [
                {
                    "prompt": _prompt_record(d.prompt),
                    "rollouts": _rollout_records(d.rollouts),
                    "reason": d.reason,
                    "num_kept_before": d.num_kept_before,
                }
                for d in batch.dropped
            ],
            "passed_over": [[_prompt_record(prompt), reason] for prompt, reason in batch.passed_over],
            "num_partial": batch.num_partial,
            "seconds": batch.seconds,
            "pool": dict(batch.pool),
        },
    )


def read_batch(path: Path) -> RolloutBatch:
    """What `write_batch` wrote, bit for bit."""
    saved = json.loads(path.read_text(encoding="utf-8"))
    return RolloutBatch(
        kept=[(_prompt_from(group["prompt"]), _rollouts_from(group["rollouts"])) for group in saved["kept"]],
        failed=_rollouts_from(saved["failed"]),
        dropped=[
            Dropped(
                _prompt_from(drop["prompt"]),
                _rollouts_from(drop["rollouts"]),
                drop["reason"],
                drop["num_kept_before"],
            )
            for drop in saved["dropped"]
        ],
        passed_over=[(_prompt_from(prompt), reason) for prompt, reason in saved["passed_over"]],
        num_partial=saved["num_partial"],
        seconds=saved["seconds"],
        pool=saved["pool"],
    )


def _prompt_record(prompt: Prompt) -> dict[str, Any]:
    return {"epoch": prompt.epoch, "record": dict(prompt.record), "token_ids": list(prompt.token_ids)}


def _prompt_from(saved: Mapping[str, Any]) -> Prompt:
    return Prompt(epoch=saved["epoch"], record=saved["record"], token_ids=tuple(saved["token_ids"]))


def _rollout_records(rollouts: list[Rollout]) -> list[str]:
    return [to_json(rollout) for rollout in rollouts]


def _rollouts_from(lines: list[str]) -> list[Rollout]:
    return [from_json(line) for line in lines]
