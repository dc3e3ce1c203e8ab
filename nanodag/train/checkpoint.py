"""Resumable state of the supervised loop: what a restarted process needs to end on the same bytes.

A checkpoint folder holds
    state.json                         updates so far, number of files, shapes of the parameters
    state-00000-of-00002.safetensors   of each rank: pieces of master weights (`weights`), optimizer state (`first` ...)
                                       and best weights so far (`snapshot`), by plane, parameter and offset
    progress.json                      what all ranks have in common: step, tokens, validation history, the plan
    rank-00000.json                    of each rank: data cursor with the packer's buffer, random generators

What is common is read from state.json and progress.json alone: a rank may hold no piece of a kind (of what AdamW
updates, say). Each rank's files repeat it, so that a rank which knew something else is seen.
"""

import base64
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanodag.errors import ConfigError, CorruptArtifact
from nanodag.errors.words import counted
from nanodag.store.checkpoints import Checkpoints
from nanodag.train.optimizer import Segment

if TYPE_CHECKING:
    from nanodag.train.batches import TokenBatches
    from nanodag.train.deepspeed_engine import TrainEngine

PROGRESS_FILE, RANK_FILE = "progress.json", "rank-{:05d}.json"
STATE_FILE, PIECES_FILE = "state.json", "state-{:05d}-of-{:05d}.safetensors"


@dataclass
class Progress:
    """Progress of a stage. tokens: input tokens trained, without padding; labels: of them with loss, or pairs; seconds:
    of training steps, as the first rank's clock has them; validation_loss: the last one; best_loss: the lowest, at
    best_step; accuracy: the share of pairs, of either; evals_since_best: validations since then; core: the last CORE,
    of the weights of core_step; benchmarks: the last scores, of those of benchmarks_step."""

    step: int = 0
    tokens: float = 0.0
    labels: float = 0.0
    seconds: float = 0.0
    validation_loss: float | None = None
    validation_bits_per_byte: float | None = None
    best_loss: float | None = None
    best_bits_per_byte: float | None = None
    validation_accuracy: float | None = None
    best_accuracy: float | None = None
    best_step: int = 0
    evals_since_best: int = 0
    core: float | None = None
    core_step: int = -1
    benchmarks: dict[str, float] = field(default_factory=dict)
    benchmarks_step: int = -1
    stopped_early: bool = False
    last_losses: list[float] = field(default_factory=list)


def newest_of_all(checkpoints: Checkpoints, engine: "TrainEngine") -> Path | None:
    """The newest valid checkpoint, the same on every rank; all must call it.

    Raises CorruptArtifact when ranks find different ones, ConfigError when it was written by another number of ranks:
    their data cursors cannot be dealt out again.
    """
    newest = checkpoints.newest_valid()
    steps = engine.gathered(-1 if newest is None else newest[0])
    if len(set(steps)) > 1:
        raise CorruptArtifact(
            f"The ranks find different checkpoints in {checkpoints.path}; their steps, rank by rank: {steps}, -1 for "
            "none. All must see the same folder; remove the checkpoints that not all of them can read."
        )
    if newest is None:
        return None
    folder = newest[1]
    num_ranks = _progress_record(folder)["common"]["num_ranks"]
    if num_ranks != engine.world_size:
        raise ConfigError(
            f"Checkpoint {folder} was written by {counted(num_ranks, 'rank')}; this stage runs on {engine.world_size}. "
            f"Set resources.num_ranks to {num_ranks}, or remove {checkpoints.path} to begin again."
        )
    return folder


def save_checkpoint(
    checkpoints: Checkpoints,
    engine: "TrainEngine",
    progress: Progress,
    cursor: "TokenBatches",
    *,
    num_steps: int,
    best: list[Tensor] | None,
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


def load_checkpoint(
    folder: Path, engine: "TrainEngine", cursor: "TokenBatches"
) -> tuple[Progress, list[Tensor] | None]:
    """Put everything back; returns progress and the best weights. Raises CorruptArtifact when ranks disagree."""
    record = _progress_record(folder)
    path = folder / RANK_FILE.format(engine.rank)
    rank_state = json.loads(path.read_text())
    _check_same(path, rank_state["common"], record["common"], PROGRESS_FILE)
    best = engine.load(folder)
    cursor.load_state_dict(rank_state["cursor"])
    _restore_random_state(rank_state["random"])
    return Progress(**record["common"]["progress"], seconds=record["seconds"]), best


def planned_steps(folder: Path) -> int:
    """The number of steps that a checkpoint's stage was planned for."""
    return int(_progress_record(folder)["common"]["num_steps"])


def _progress_record(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / PROGRESS_FILE).read_text())
    return record


def key(plane: str, segment: Segment) -> str:
    """A piece's name in a file."""
    return f"{plane}|{segment.name}|{segment.offset}"


def write_state(folder: Path, rank: int, common: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a rank's pieces, by `key`; the first rank writes what is common, too: num_updates, num_files, shapes."""
    text = json.dumps(common, sort_keys=True)
    save_file(tensors, folder / PIECES_FILE.format(rank, common["num_files"]), metadata={"common": text})
    if rank == 0:
        (folder / STATE_FILE).write_text(text)


@dataclass(frozen=True)
class SavedState:
    """Pieces that `write_state` wrote. num_updates: the optimizer's steps. pieces: by plane and parameter the offset,
    the length and the slice of a file."""

    folder: Path
    num_updates: int
    shapes: Mapping[str, tuple[int, ...]]
    pieces: Mapping[tuple[str, str], list[tuple[int, int, Any]]]

    def fill(self, plane: str, segment: Segment, target: Tensor) -> None:
        """Copy what belongs to a segment into its view. Raises CorruptArtifact when a part of it is nowhere."""
        missing = segment.length
        for offset, length, part in self.pieces.get((plane, segment.name), []):
            begin, end = max(offset, segment.offset), min(offset + length, segment.offset + segment.length)
            if begin < end:
                target[begin - segment.offset : end - segment.offset].copy_(part[begin - offset : end - offset])
                missing -= end - begin
        if missing:
            raise CorruptArtifact(
                f"Checkpoint {self.folder} lacks {missing} of {segment.length} elements of {plane} of {segment.name}; "
                "it belongs to another optimizer."
            )


@contextmanager
def saved_state(folder: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Iterator[SavedState]:
    """Files of `write_state`, open for reading parts of them, by any number of ranks. shapes: of the parameters that
    it is for; without them, any.

    Raises CorruptArtifact, naming file and values, when files are missing or disagree, or are of other parameters.
    """
    path = folder / STATE_FILE
    if not path.exists():
        raise CorruptArtifact(
            f"Checkpoint {folder} holds no {STATE_FILE}: it is not whole. Remove the checkpoint to begin again from "
            "the one before."
        )
    common = json.loads(path.read_text())
    saved = {name: tuple(shape) for name, shape in common["shapes"].items()}
    shapes = saved if shapes is None else shapes
    if differing := sorted(name for name in saved.keys() | shapes.keys() if saved.get(name) != shapes.get(name)):
        name = differing[0]
        raise CorruptArtifact(
            f"Checkpoint {folder} belongs to another model: it differs in {counted(len(differing), 'parameter')}; "
            f"{name} has the shape {saved.get(name)} there, {shapes.get(name)} here."
        )
    pieces: dict[tuple[str, str], list[tuple[int, int, Any]]] = {}
    with ExitStack() as stack:
        for rank in range(common["num_files"]):
            path = folder / PIECES_FILE.format(rank, common["num_files"])
            if not path.exists():
                raise CorruptArtifact(f"Checkpoint {folder} lacks {path.name}, which {STATE_FILE} counts.")
            opened = stack.enter_context(safe_open(str(path), framework="pt"))
            _check_same(path, json.loads(opened.metadata()["common"]), common, STATE_FILE)
            for name in opened.keys():  # noqa: SIM118 - not a dict
                plane, parameter, offset = name.split("|")
                part = opened.get_slice(name)
                pieces.setdefault((plane, parameter), []).append((int(offset), part.get_shape()[0], part))
        yield SavedState(folder, common["num_updates"], saved, pieces)


def _check_same(path: Path, claimed: Mapping[str, Any], common: Mapping[str, Any], common_file: str) -> None:
    """Raise CorruptArtifact when a rank's file claims another value than the file that holds what is common."""
    for name, value in common.items():
        if claimed.get(name) != value:
            raise CorruptArtifact(
                f"The ranks of checkpoint {path.parent} disagree: {path.name} says {name} {claimed.get(name)}, "
                f"{common_file} says {value}. Remove the checkpoint to begin again from the one before."
            )


def _random_state() -> dict[str, Any]:
    algorithm, keys, *others = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [algorithm, np.asarray(keys).tolist(), *others],
        "torch": _encoded(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        states["cuda"] = _encoded(torch.cuda.get_rng_state())
    return states


def _restore_random_state(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(_bytes_tensor(states["torch"]))
    if "cuda" in states:
        torch.cuda.set_rng_state(_bytes_tensor(states["cuda"]))


def _encoded(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes_tensor(encoded: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)
