"""Checkpoints: resumable state inside a stage. One commit is one folder; it is whole or it does not count.

They are mirrored to a remote store while the stage works, so that another machine can resume it.
"""

import json
import logging
import os
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from nanodag.errors import CorruptArtifact, StoreError
from nanodag.store.atomic import fsync_folders, fsync_path, hashes_below, sha256_of, write_json, writing
from nanodag.store.backends import RemoteBackend
from nanodag.store.manifest import is_inside

log = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
STEP = re.compile(r"step-(\d{8})$")
POLL_S = 2.0
NICENESS = 10


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
            committed = [folder for _, folder in reversed(steps_in(self.path))]
            place = committed.index(final)
            for leftover in [*committed[:place], *committed[place + self.keep :], *self.path.glob("*.old.tmp")]:
                shutil.rmtree(leftover)
        return final

    def newest_valid(self) -> tuple[int, Path] | None:
        """Step and folder of the newest checkpoint whose every byte is as committed; a damaged one is named in a
        warning and the one before is tried."""
        for _, folder in reversed(steps_in(self.path)):
            try:
                return verify_checkpoint(folder), folder
            except CorruptArtifact as error:
                log.warning("%s Going back to the checkpoint before it.", error)
        return None


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


class Mirror:
    """Copies the newest checkpoint of a folder whenever there is a newer one. Use as a context around the worker.

    A thread of the process that started the worker copies, at low priority; the worker never waits for it.
    <store>/checkpoints/<key>/ has one folder for each step; its checkpoint.json is copied last.

    A copy that fails is logged as a warning and tried again; the stage continues. Leaving the context copies the newest
    checkpoint first; call `drop` once the stage's result is published.
    """

    def __init__(self, backend: RemoteBackend, key: str, folder: Path) -> None:
        self._backend, self._home, self._folder = backend, f"checkpoints/{key}", folder
        self._copied = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_copying, name="checkpoint mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def restore(self) -> int | None:
        """Bring the newest mirrored checkpoint here unless a valid one is as new; returns the step it brought.

        Each is verified before it counts; a damaged one is named in a warning and the one before is tried.
        """
        here = Checkpoints(self._folder).newest_valid()
        with suppress(*([] if here is None else [StoreError, OSError])):  # the one here does where the store is away
            for name in reversed(self._steps()):
                if here is not None and int(name.rpartition("-")[2]) <= here[0]:
                    return None
                try:
                    step = self._bring(name)
                except FileNotFoundError:  # copied in part
                    continue
                except CorruptArtifact as error:
                    log.warning("%s Going back to the mirrored checkpoint before it.", error)
                    continue
                log.info("Going on from the mirrored checkpoint of step %d.", step)
                return step
        return None

    def drop(self) -> None:
        self._backend.clear(self._home)

    def copy_newest(self) -> bool:
        """Copy the newest committed checkpoint, then remove older copies; False when that was done already, or when the
        checkpoint went away meanwhile, for a newer one."""
        committed = steps_in(self._folder)
        if not committed or (newest := committed[-1][1].name) == self._copied:
            return False
        source, target = self._folder / newest, f"{self._home}/{newest}"
        try:
            text = (source / MANIFEST).read_text(encoding="utf-8")
            for name in json.loads(text)["files"]:
                self._backend.push(source / name, f"{target}/{name}")
        except FileNotFoundError:
            return False
        self._backend.write_text(f"{target}/{MANIFEST}", text)
        self._copied = newest
        for name in self._steps():
            if name < self._copied:  # a newer one is another machine's
                self._backend.clear(f"{self._home}/{name}")
        return True

    def _steps(self) -> list[str]:
        return sorted(name for name in self._backend.names(self._home) if STEP.fullmatch(name))

    def _bring(self, name: str) -> int:
        text = self._backend.read_text(f"{self._home}/{name}/{MANIFEST}")
        try:
            files = list(json.loads(text)["files"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptArtifact(f"Mirrored checkpoint {name} has no readable {MANIFEST} ({error}).") from error
        temporary = self._folder / f"{name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for file in files:
            if not is_inside(file):
                raise CorruptArtifact(f"Mirrored checkpoint {name} names the file {file!r}, which lies outside of it.")
            self._backend.pull(f"{self._home}/{name}/{file}", temporary / file)
        (temporary / MANIFEST).write_text(text, encoding="utf-8")
        step = verify_checkpoint(temporary)
        shutil.rmtree(self._folder / name, ignore_errors=True)  # a damaged one, or it would not be asked for
        os.rename(temporary, self._folder / name)
        return step

    def _keep_copying(self) -> None:
        if hasattr(os, "setpriority"):  # on Linux this is the thread's alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            is_last = self._ended.wait(POLL_S)
            try:
                self.copy_newest()
            except (StoreError, OSError, ValueError, LookupError, TypeError) as error:
                log.warning("The newest checkpoint is not mirrored: %s", error)
            if is_last:
                return
