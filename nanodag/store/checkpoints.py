"""Checkpoints: resumable state inside a stage. One commit is one folder; it is whole or it does not count."""

import json
import logging
import os
import re
import shutil
from pathlib import Path

from nanodag.errors import CorruptArtifact
from nanodag.store.atomic import fsync_folders, fsync_path, hashes_below, sha256_of, write_json, writing

log = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
STEP = re.compile(r"step-(\d{8})$")


class Checkpoints:
    """The checkpoints of one stage, oldest removed first.

    path: the folder they lie in; made when missing. keep: how many valid ones stay on disk.

    Several ranks may fill the folder that `begin` named; exactly one process calls `begin` and `commit`.
    """

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        self.path = path
        self.keep = keep
        path.mkdir(parents=True, exist_ok=True)

    def begin(self, step: int) -> Path:
        """An empty temporary folder to fill; anything half-written for the same step before is removed."""
        folder = self.temporary(step)
        with writing(f"Beginning checkpoint {folder}"):
            for leftover in self.path.glob("*.tmp"):
                shutil.rmtree(leftover)
            folder.mkdir()
        return folder

    def temporary(self, step: int) -> Path:
        """The name that `begin` uses for this step, for ranks that did not call it."""
        return self.path / f"step-{step:08d}.tmp"

    def commit(self, step: int) -> Path:
        """Hash every file, write the manifest last, make it durable, give it its final name, drop the oldest.

        Folders of later steps are damaged, else the stage would have resumed from them: they go too, and do not count
        among those that are kept.
        """
        folder = self.temporary(step)
        final = self.path / f"step-{step:08d}"
        with writing(f"Writing checkpoint {final}"):
            hashes = hashes_below(folder)
            for name in hashes:
                fsync_path(folder / name)
            fsync_folders(folder)
            write_json(folder / MANIFEST, {"step": step, "files": hashes})
            if final.exists():  # a rerun of the same step after a damaged one was passed over
                os.rename(final, final.with_suffix(".old.tmp"))
            os.rename(folder, final)
            fsync_path(self.path)
            committed = self._committed()
            place = committed.index(final)
            for leftover in [*committed[:place], *committed[place + self.keep :], *self.path.glob("*.old.tmp")]:
                shutil.rmtree(leftover)
        return final

    def newest_valid(self) -> tuple[int, Path] | None:
        """Step and folder of the newest checkpoint whose every byte is as committed; a damaged one is named in a
        warning and the one before is tried."""
        for folder in self._committed():
            try:
                return verify_checkpoint(folder), folder
            except CorruptArtifact as error:
                log.warning("%s Going back to the checkpoint before it.", error)
        return None

    def _committed(self) -> list[Path]:
        return [folder for _, folder in reversed(steps_in(self.path))]


def steps_in(path: Path) -> list[tuple[int, Path]]:
    """Step and folder of every committed checkpoint in a folder that may not be there, oldest first; not verified."""
    matches = [(match, folder) for folder in path.glob("step-*") if (match := STEP.fullmatch(folder.name))]
    return sorted((int(match[1]), folder) for match, folder in matches)


def verify_checkpoint(folder: Path) -> int:
    """The step of a checkpoint whose every byte is as committed. Raises CorruptArtifact naming the file."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files, step = manifest["files"], int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptArtifact(f"Checkpoint {folder} has no readable {MANIFEST} ({error}).") from error
    for name, facts in files.items():
        file = folder / name
        try:
            is_same = file.stat().st_size == facts["bytes"] and sha256_of(file) == facts["sha256"]
        except FileNotFoundError:
            raise CorruptArtifact(f"Checkpoint file {file} is missing.") from None
        except OSError as error:
            raise CorruptArtifact(f"Checkpoint file {file} cannot be read ({error}).") from error
        if not is_same:
            raise CorruptArtifact(f"Checkpoint file {file} differs from its recorded sha256.")
    return step
