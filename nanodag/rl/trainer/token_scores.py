"""The trainer's numbers for each token of a step, kept beside the rollouts for readers.

Rank R writes `step-N.scores-R.jsonl`, a line a rollout: group_id, sample_index, branch, and two numbers for each token
after the prompt. One is the token's advantage, the other its mismatch: the log-probability by the trainer at the start
of the step less the sampler's, in nats. Both are null for a token that is not trained.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from nanodag.rl.rollouts.rollout import Rollout
from nanodag.rl.trainer.policy import DeviceRow

Scores = tuple[DeviceRow, Tensor, Tensor]
"""A row with its advantages and old log-probabilities, (N,) float32 each."""


def write_scores(path: Path, parts: Sequence[tuple[Sequence[Rollout], Iterable[Scores]]]) -> None:
    """Write a rank's share of a step. parts: the rollouts of each update, and this rank's rows of them."""
    lines = [line for rollouts, rows in parts for row in rows for line in _lines(rollouts, row)]
    path.write_text("".join(lines), encoding="utf-8")


def _lines(rollouts: Sequence[Rollout], scores: Scores) -> Iterable[str]:
    row, advantages, old_logprobs = scores
    mask = row.mask.tolist()
    columns = [
        [round(v, 5) if is_trained and math.isfinite(v) else None for v, is_trained in zip(of, mask, strict=True)]
        for of in (advantages.tolist(), (old_logprobs - row.sampler_logprobs).tolist())
    ]
    sizes = row.sequence_ids.bincount(minlength=len(row.rollouts)).tolist()
    start = 0
    for index, size in zip(row.rollouts.tolist(), sizes, strict=True):
        place, start = slice(start, start + size), start + size
        if any(mask[place]):  # a row that only keeps a rank busy is masked
            rollout = rollouts[index]
            record = {
                "group_id": rollout.group_id,
                "sample_index": rollout.sample_index,
                "branch": rollout.branch,
                "advantages": columns[0][place],
                "differences": columns[1][place],
            }
            yield json.dumps(record, separators=(",", ":")) + "\n"
