"""Checks of a running RL stage: functions that raise where something does not hold. No torch here."""

import logging
from collections.abc import Awaitable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nanodag.config.rl_sections import WeightsSection
from nanodag.errors import StageFailed
from nanodag.rl.control.schedule import StopRequested
from nanodag.rl.rollouts.batch import RolloutBatch
from nanodag.worker.job import stop_requested

log = logging.getLogger(__name__)
T = TypeVar("T")

EMPTY_STEPS_IN_A_ROW = 10
CUT_FROM = 0.5
FEW_SHARE = 1 / 8
FIRST_STEPS = 10


async def unless_stopped(work: Awaitable[T]) -> T:
    """Result of the work. Raises StopRequested after a stop signal, which may have ended what computes rewards."""
    try:
        result = await work
    except StageFailed:
        if not stop_requested():
            raise
        raise StopRequested from None
    if stop_requested():
        raise StopRequested
    return result


def check_mismatch(found: float, weights: WeightsSection, *, is_stale: bool) -> None:
    """Raise StageFailed for a sampler that cannot have the trainer's weights. found: nats a token."""
    name = "stale_mismatch_limit" if is_stale else "mismatch_limit"
    if found > (limit := getattr(weights, name)):
        raise StageFailed(
            f"The log-probabilities of sampler and trainer differ by {found:.3g} nats a token on average; "
            f"weights.{name} is {limit:g}. The sampler does not have the trainer's weights, or computes something "
            "else" + (", or learning_rate is far too high." * is_stale or ".")
        )


def warn_of_first_step(values: Mapping[str, float], batch: RolloutBatch, *, max_new_tokens: int) -> None:
    """Log what a stage's first rollouts show to be wrong, as far as many more would show the same. values: metrics."""
    num_kept = len(batch.kept) + batch.num_partial
    if num_kept <= FEW_SHARE * (num_groups := num_kept + len(batch.dropped)):
        dropped = ", ".join(f"{name} {number:g}" for name, number in values.items() if name.startswith("dropped_"))
        is_solved = values.get("reward", 0.0) > 0.5
        advice = ("easy", "harder ones") if is_solved else ("hard", "easier ones, or SFT on them first")
        log.warning(
            "Step 1: %d of %d groups are left to learn from (%s; mean reward %.3g). The prompts may be too %s for this "
            "model: take %s; or more samples_per_prompt, or a reward with parts. %d steps without any end the stage.",
            num_kept,
            num_groups,
            dropped or "none was dropped",
            values.get("reward", 0.0),
            *advice,
            EMPTY_STEPS_IN_A_ROW,
        )
    if (share := values["truncated_share"]) >= CUT_FROM:
        log.warning(
            "Step 1: %.0f %% of the responses were cut at max_new_tokens %d, and are judged without their ends: raise "
            "it, or train the model on shorter answers first.",
            100 * share,
            max_new_tokens,
        )


def warn_of_fall(step: int, first: Mapping[str, float], now: Mapping[str, float]) -> Mapping[str, float]:
    """Log that rewards fell at once, beyond noise. first, now: `low` and `high`, the 95 % interval of the mean reward
    of step 1 and of this step, empty where it is not known. Returns what the next step is held against."""
    if step == 1 or not first or not now or now["high"] >= first["low"]:
        return now if step == 1 else first
    log.warning(
        "Step %d: the mean reward is at most %.3g; in step 1 it was at least %.3g. The first updates unlearn what the "
        "model knew: raise optimizer.warmup_steps, or lower optimizer.learning_rate.",
        *(step, now["high"], first["low"]),
    )
    return {}


def check_ranks(folder: Path, replies: Sequence[Mapping[str, Any]], version: int) -> None:
    """Raise StageFailed when a rank that saved or loaded a checkpoint made other updates than the controller counts."""
    counts = [reply["num_updates"] for reply in replies]
    if any(count != version for count in counts):
        raise StageFailed(
            f"Checkpoint {folder}: the trainer's ranks made {counts} updates, the controller counts {version}. Remove "
            "the checkpoint to begin again from the one before."
        )


def check_totals(folder: Path, saved: Collection[str], known: Collection[str]) -> None:
    """Raise StageFailed for a checkpoint whose totals are not those that this version counts."""
    if set(saved) != set(known):
        raise StageFailed(
            f"Checkpoint {folder} was saved by another version of nanodag: it counts {', '.join(saved)}, and this one "
            f"{', '.join(known)}. Remove the stage's checkpoints to begin it again."
        )


def check_source(folder: Path, saved: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise StageFailed for a checkpoint of rollouts that have changed since. saved, found: identities of the files."""
    if saved != found:
        raise StageFailed(
            f"Checkpoint {folder} was made with other files of rollout.source: their content has changed since. Put "
            "them back, or remove the checkpoint to begin the stage again."
        )
