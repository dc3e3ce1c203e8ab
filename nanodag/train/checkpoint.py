"""Resumable state of the supervised loop: what a restarted process needs to end on the same bytes.

A checkpoint folder holds
    state.json, state-*.safetensors   master weights, optimizer state, best weights so far (nanodag.train.state)
    progress.json                     what all ranks have in common: step, tokens, validation history, the plan
    rank-00000.json                   of each rank: data cursor with the packer's buffer, random generators

What is common is read from progress.json alone. Each rank's file repeats it, so that a rank which knew something else
is seen.
"""

import base64
import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from nanodag.errors import ConfigError, CorruptArtifact
from nanodag.errors.words import counted
from nanodag.store.checkpoints import Checkpoints
from nanodag.train.deepspeed_engine import TrainEngine
from nanodag.train.state import check_same

PROGRESS_FILE = "progress.json"
RANK_FILE = "rank-{:05d}.json"


class Cursor(Protocol):
    """A data source whose position can be kept."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Progress:
    """Progress of a stage. tokens: input tokens trained, without padding; labels: of them with loss; seconds: of
    training steps, as the first rank's clock has them; validation_loss: the last one; best_loss: the lowest, at
    best_step; evals_since_best: validations since then; core: the last CORE, of the weights of core_step."""

    step: int = 0
    tokens: float = 0.0
    labels: float = 0.0
    seconds: float = 0.0
    validation_loss: float | None = None
    validation_bits_per_byte: float | None = None
    best_loss: float | None = None
    best_bits_per_byte: float | None = None
    best_step: int = 0
    evals_since_best: int = 0
    core: float | None = None
    core_step: int = 0
    stopped_early: bool = False
    last_losses: list[float] = field(default_factory=list)


def newest_of_all(checkpoints: Checkpoints, engine: TrainEngine) -> Path | None:
    """The newest valid checkpoint, the same on every rank; all must call it.

    Raises CorruptArtifact when ranks find different ones, ConfigError when it was written by another number of ranks:
    their data cursors cannot be dealt out again.
    """
    newest = checkpoints.newest_valid()
    steps = [int(step) for step in engine.by_rank(-1 if newest is None else newest[0])]
    if len(set(steps)) > 1:
        raise CorruptArtifact(
            f"The ranks find different checkpoints in {checkpoints.path}; their steps, rank by rank: {steps}, -1 for "
            "none. All must see the same folder; remove the checkpoints that not all of them can read."
        )
    if newest is None:
        return None
    folder = newest[1]
    num_ranks = _common(folder)["num_ranks"]
    if num_ranks != engine.world_size:
        raise ConfigError(
            f"Checkpoint {folder} was written by {counted(num_ranks, 'rank')}; this stage runs on {engine.world_size}. "
            f"Set resources.num_ranks to {num_ranks}, or remove {checkpoints.path} to begin again."
        )
    return folder


def save_checkpoint(
    checkpoints: Checkpoints,
    engine: TrainEngine,
    progress: Progress,
    cursor: Cursor,
    *,
    num_steps: int,
    best: list[torch.Tensor] | None,
) -> None:
    """Write and commit a checkpoint; every rank must call it."""
    if engine.rank == 0:
        checkpoints.begin(progress.step)
    engine.barrier()
    folder = checkpoints.temporary(progress.step)
    engine.save(folder, snapshot=best)
    reached = asdict(progress)
    seconds = reached.pop("seconds")
    common = {"progress": reached, "num_steps": num_steps, "num_ranks": engine.world_size}
    rank_state = {"common": common, "cursor": cursor.state_dict(), "random": _random_state()}
    (folder / RANK_FILE.format(engine.rank)).write_text(json.dumps(rank_state))
    if engine.rank == 0:
        (folder / PROGRESS_FILE).write_text(json.dumps({"common": common, "seconds": seconds}))
    engine.barrier()
    if engine.rank == 0:
        checkpoints.commit(progress.step)
    engine.barrier()


def load_checkpoint(folder: Path, engine: TrainEngine, cursor: Cursor) -> tuple[Progress, list[torch.Tensor] | None]:
    """Put everything back; returns progress and the best weights. Raises CorruptArtifact when ranks disagree."""
    record = json.loads((folder / PROGRESS_FILE).read_text())
    path = folder / RANK_FILE.format(engine.rank)
    rank_state = json.loads(path.read_text())
    check_same(path, rank_state["common"], record["common"], common_file=PROGRESS_FILE)
    best = engine.load(folder)
    cursor.load_state_dict(rank_state["cursor"])
    _restore_random_state(rank_state["random"])
    return Progress(**record["common"]["progress"], seconds=record["seconds"]), best


def planned_steps(folder: Path) -> int:
    """The number of steps that a checkpoint's stage was planned for."""
    return int(_common(folder)["num_steps"])


def _common(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / PROGRESS_FILE).read_text())
    if "common" not in record:
        raise CorruptArtifact(f"Checkpoint {folder} is of an older nanodag; remove it to begin the stage again.")
    return record["common"]


def _random_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "python": [version, list(numbers), gauss],
        "numpy": [algorithm, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": base64.b64encode(bytes(torch.get_rng_state().tolist())).decode(),
    }
    if torch.cuda.is_available():
        states["cuda"] = base64.b64encode(bytes(torch.cuda.get_rng_state().tolist())).decode()
    return states


def _restore_random_state(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(_bytes_tensor(states["torch"]))
    if "cuda" in states:
        torch.cuda.set_rng_state(_bytes_tensor(states["cuda"]))


def _bytes_tensor(encoded: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)
