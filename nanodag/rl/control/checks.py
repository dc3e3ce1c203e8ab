"""What must hold while an RL stage runs: functions that raise where it does not. No torch here."""

from collections.abc import Awaitable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nanodag.errors import CorruptArtifact, StageFailed
from nanodag.rl.control.schedule import StopRequested
from nanodag.worker.job import stop_requested

# Mean size of old minus sampler logprob, in nats a token, above which the sampler does not have the weights it says. In
# that of stale rollouts is also what the policy learned since, so only what no step can do is refused.
LARGEST_MISMATCH = {"fp32": 0.01, "bf16": 0.3}
LARGEST_STALE_MISMATCH = 2.0

T = TypeVar("T")


async def unless_stopped(work: Awaitable[T]) -> T:
    """What it finds. Raises StopRequested when a stop was asked for meanwhile: the signal may have ended what computes
    rewards."""
    try:
        result = await work
    except StageFailed:
        if not stop_requested():
            raise
        raise StopRequested from None
    if stop_requested():
        raise StopRequested
    return result


def check_mismatch(found: float, *, precisions: Collection[str], is_stale: bool) -> None:
    """Raise StageFailed for a sampler that cannot have the trainer's weights. found: nats a token. precisions: of
    trainer and sampler."""
    precision = "bf16" if "bf16" in precisions else "fp32"
    limit = LARGEST_STALE_MISMATCH if is_stale else LARGEST_MISMATCH[precision]
    if found > limit:
        raise StageFailed(
            f"The log-probabilities of sampler and trainer differ by {found:.3g} nats a token on average; {limit} "
            f"is the limit for {'stale rollouts' if is_stale else precision}. The sampler does not have the "
            "trainer's weights, or computes something else"
            + (", or learning_rate is far too high." * is_stale or ".")
        )


def check_ranks(folder: Path, replies: Sequence[Mapping[str, Any]], version: int) -> None:
    """Raise StageFailed when a rank of the trainer that saved or loaded a checkpoint made other updates than the
    controller counts."""
    counts = [reply["num_updates"] for reply in replies]
    if set(counts) != {version}:
        raise StageFailed(
            f"Checkpoint {folder}: the trainer's ranks made {counts} updates, the controller counts {version}. Remove "
            "the checkpoint to begin again from the one before."
        )


def check_totals(folder: Path, saved: Collection[str], known: Collection[str]) -> None:
    """Raise CorruptArtifact for a checkpoint whose totals are not those that this version counts."""
    if set(saved) != set(known):
        raise CorruptArtifact(
            f"Checkpoint {folder} was saved by another version of nanodag: it counts {', '.join(saved)}, and this one "
            f"{', '.join(known)}. Remove it to begin the stage again."
        )
