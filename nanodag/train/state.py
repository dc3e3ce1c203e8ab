"""An engine's state on disk: what all ranks have in common in one place, and each rank's pieces of tensors.

    state.json                         updates so far, number of files, shapes of the parameters
    state-00000-of-00002.safetensors   pieces of the first rank, by plane (`weights`, `first` ...), parameter and offset

A rank may hold no piece of a kind (of what AdamW updates, say), so nothing that all share is asked of a rank. Each file
repeats state.json in its metadata; files that disagree with it were not written together.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanodag.errors import CorruptArtifact
from nanodag.errors.words import counted
from nanodag.train.optimizer import Segment

COMMON_FILE = "state.json"
RANK_FILE = "state-{rank:05d}-of-{num_files:05d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Common:
    """State that is the same on every rank. num_updates: the optimizer's steps."""

    num_updates: int
    num_files: int
    shapes: Mapping[str, tuple[int, ...]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def key(plane: str, segment: Segment) -> str:
    """A piece's name in a file."""
    return f"{plane}|{segment.name}|{segment.offset}"


def write_state(folder: Path, rank: int, common: Common, tensors: dict[str, Tensor]) -> None:
    """Write a rank's pieces, by `key`; the first rank writes what is common, too."""
    path = folder / RANK_FILE.format(rank=rank, num_files=common.num_files)
    save_file(tensors, path, metadata={"common": common.to_json()})
    if rank == 0:
        (folder / COMMON_FILE).write_text(common.to_json())


class SavedState:
    """Files of `write_state`, open for reading parts of it, by any number of ranks. shapes: of the parameters that
    it is for. Use as a context manager.

    Entering raises CorruptArtifact, naming file and values, when files are missing or disagree, or when it is the state
    of other parameters.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._folder = folder
        self._shapes = shapes
        self._found: dict[tuple[str, str], list[tuple[int, int, Any]]] = {}  # offset, length, slice of a file
        self.num_updates = 0

    def __enter__(self) -> "SavedState":
        common = self._common()
        self.num_updates = common["num_updates"]
        with ExitStack() as stack:  # closes what is open when one is refused
            for rank in range(common["num_files"]):
                path = self._folder / RANK_FILE.format(rank=rank, num_files=common["num_files"])
                if not path.exists():
                    raise CorruptArtifact(f"Checkpoint {self._folder} lacks {path.name}, which {COMMON_FILE} counts.")
                opened = stack.enter_context(safe_open(str(path), framework="pt"))
                check_same(path, json.loads(opened.metadata()["common"]), common, common_file=COMMON_FILE)
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    plane, parameter, offset = name.split("|")
                    part = opened.get_slice(name)
                    self._found.setdefault((plane, parameter), []).append((int(offset), part.get_shape()[0], part))
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def has(self, plane: str) -> bool:
        return any(saved_plane == plane for saved_plane, _ in self._found)

    def fill(self, plane: str, segment: Segment, target: Tensor) -> None:
        """Copy what belongs to a segment into its view. Raises CorruptArtifact when a part of it is nowhere."""
        missing = segment.length
        for offset, length, part in self._found.get((plane, segment.name), []):
            begin, end = max(offset, segment.offset), min(offset + length, segment.offset + segment.length)
            if begin < end:
                target[begin - segment.offset : end - segment.offset].copy_(part[begin - offset : end - offset])
                missing -= end - begin
        if missing:
            raise CorruptArtifact(
                f"Checkpoint {self._folder} lacks {missing} of {segment.length} elements of {plane} of {segment.name}; "
                "it belongs to another optimizer."
            )

    def _common(self) -> dict[str, Any]:
        path = self._folder / COMMON_FILE
        if not path.exists():
            raise CorruptArtifact(
                f"Checkpoint {self._folder} holds no {COMMON_FILE}: it is not whole, or an older nanodag wrote it. "
                "Remove the checkpoint to begin again from the one before."
            )
        common = json.loads(path.read_text())
        saved = {name: tuple(shape) for name, shape in common["shapes"].items()}
        differing = sorted(
            name for name in saved.keys() | self._shapes.keys() if saved.get(name) != self._shapes.get(name)
        )
        if differing:
            name = differing[0]
            raise CorruptArtifact(
                f"Checkpoint {self._folder} belongs to another model: it differs in "
                f"{counted(len(differing), 'parameter')}; {name} has the shape {saved.get(name)} there, "
                f"{self._shapes.get(name)} here."
            )
        return common


def check_same(path: Path, claimed: Mapping[str, Any], common: Mapping[str, Any], *, common_file: str) -> None:
    """Raise CorruptArtifact when a rank's file claims another value than the file that holds what is common."""
    for name, value in common.items():
        if claimed.get(name) != value:
            raise CorruptArtifact(
                f"The ranks of checkpoint {path.parent} disagree: {path.name} says {name} {claimed.get(name)}, "
                f"{common_file} says {value}. Remove the checkpoint to begin again from the one before."
            )
