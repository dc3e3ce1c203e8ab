"""Checkpoints of a stage under way, copied to a remote store while it works, so that another machine can resume it.

A thread of the process that started the worker copies, at low priority; the worker never waits for it.
<store>/checkpoints/<key>/ has one folder for each step; its checkpoint.json is copied last.
"""

import json
import logging
import os
import shutil
import threading
from pathlib import Path

from nanodag.errors import CorruptArtifact, StoreError
from nanodag.store.checkpoints import MANIFEST, STEP, Checkpoints, steps_in, verify_checkpoint
from nanodag.store.manifest import is_inside
from nanodag.store.remote_backend import RemoteBackend

log = logging.getLogger(__name__)

POLL_S = 2.0
NICENESS = 10


class Mirror:
    """Copies the newest checkpoint of a folder whenever there is a newer one. Use as a context around the worker.

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
        """Bring the newest mirrored checkpoint here when there is no valid one; returns the step it brought.

        Each is verified before it counts; a damaged one is named in a warning and the one before is tried.
        """
        if Checkpoints(self._folder).newest_valid() is not None:
            return None
        for name in reversed(self._steps()):
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
            if name != self._copied:
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
            except StoreError as error:
                log.warning("The newest checkpoint is not mirrored: %s", error)
            if is_last:
                return
