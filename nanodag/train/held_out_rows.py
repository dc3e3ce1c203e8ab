"""Arrays that are made once, and kept in the store for the ranks of a stage, its restarts, and every other stage with
the same data and tokenizer: the packed rows that it is validated on, and a reference's log-probabilities.

Rows are the same whatever the number of ranks and the micro-batch: rank r takes the rows r, r + n, r + 2 n ...
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from nanodag.store.atomic import locked, write_bytes, writing
from nanodag.store.manifest import canonical_json
from nanodag.train.packing import Batch

if TYPE_CHECKING:
    from nanodag.train.deepspeed_engine import TrainEngine

log = logging.getLogger(__name__)

KEPT_FILES = 8  # those used last
_WAIT_S = 6 * 3600.0  # for another rank that makes them
_FORMAT = 2


@dataclass(frozen=True, eq=False)
class HeldOutRows:
    """N packed rows of T positions, as in Batch. input_ids, labels, document_ids: (N, T) int32. surplus_bytes: (N,)
    int64."""

    input_ids: np.ndarray
    labels: np.ndarray
    document_ids: np.ndarray
    surplus_bytes: np.ndarray

    def batches(self, *, rank: int, world: int, batch_rows: int, pad_id: int) -> list[Batch]:
        """This rank's; the last one is filled up with padding."""
        own = np.arange(rank, len(self.input_ids), world)
        return [self._batch(own[n : n + batch_rows], batch_rows, pad_id) for n in range(0, len(own), batch_rows)]

    def _batch(self, rows: np.ndarray, batch_rows: int, pad_id: int) -> Batch:
        def filled(array: np.ndarray, value: int, dtype: type) -> np.ndarray:
            missing = ((0, batch_rows - len(rows)), (0, 0))
            return np.pad(array[rows].astype(dtype), missing, constant_values=value)

        return Batch(
            filled(self.input_ids, pad_id, np.int64),
            filled(self.labels, -100, np.int64),
            filled(self.document_ids, -1, np.int32),
            int(self.surplus_bytes[rows].sum()),
        )


def held_out_rows(folder: Path, recipe: Mapping[str, Any], make: Callable[[], Iterator[Batch]]) -> HeldOutRows:
    """The rows of a recipe: from the folder, else made and put there, by one of the processes that ask for them.

    recipe: all that the rows follow from, JSON values. make: batches of one row each.
    """
    digest = _digest(recipe)
    path = folder / f"{digest}.safetensors"
    with locked(folder / f"{digest}.lock", timeout_s=_WAIT_S):
        arrays = _read(path)
        if arrays is None:
            batches, arrays = list(make()), {}
            for name in ("input_ids", "labels", "document_ids"):
                parts = [getattr(batch, name).astype(np.int32) for batch in batches]
                arrays[name] = np.concatenate(parts) if parts else np.zeros((0, 1), np.int32)
            arrays["surplus_bytes"] = np.array([batch.surplus_bytes for batch in batches], dtype=np.int64)
            _write(path, arrays)
            log.info("Packed %d held-out rows into %s.", len(arrays["input_ids"]), path)
    return HeldOutRows(**arrays)


Table = dict[int, tuple[float, float]]


def kept_table(folder: Path, recipe: Mapping[str, Any], make: Callable[[], Table], engine: "TrainEngine") -> Table:
    """The table of a recipe: from the folder, else made by all ranks and put there. Every rank must call it."""
    path = folder / f"{_digest(recipe)}.safetensors"
    arrays = _read(path)
    if engine.highest(float(arrays is None)):
        table = make()
        if engine.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            values = np.array(list(table.values()), np.float32).reshape(-1, 2)
            _write(path, {"keys": np.array(list(table), np.uint64), "values": values})
        return table
    assert arrays is not None
    return dict(zip(arrays["keys"].tolist(), map(tuple, arrays["values"].tolist()), strict=True))


def _digest(recipe: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json({"format": _FORMAT, **recipe}).encode()).hexdigest()[:40]


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """None where there is no such file, or a damaged one."""
    try:
        with safe_open(str(path), framework="np") as opened:
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            is_whole = opened.metadata()["sha256"] == _sha256(arrays)
    except FileNotFoundError:
        return None
    except SafetensorError as error:
        log.warning("%s cannot be read (%s) and is made again.", path, error)
        return None
    if not is_whole:
        log.warning("%s differs from its recorded sha256 and is made again.", path)
        return None
    os.utime(path)
    return arrays


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with writing(f"Keeping {path}"):
        write_bytes(path, save(dict(arrays), {"sha256": _sha256(arrays)}))
        by_age = sorted(path.parent.glob("*.safetensors"), key=lambda file: file.stat().st_mtime, reverse=True)
        for old in by_age[KEPT_FILES:]:
            old.unlink(missing_ok=True)
            old.with_suffix(".lock").unlink(missing_ok=True)


def _sha256(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for _, array in sorted(arrays.items()):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
