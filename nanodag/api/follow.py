"""The newest weights of a run that is under way, handed to the engines of one model."""

import asyncio
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nanodag.config.kind import MODEL
from nanodag.config.kinds import recorded_kind
from nanodag.engines.fleet import Fleet
from nanodag.errors import ArtifactNotFound, NanodagError, SamplerError
from nanodag.host.threads import in_thread
from nanodag.store import Store
from nanodag.store.checkpoints import steps_in

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
MAX_PAUSE_S = 60.0  # between looks where weights cannot be read again and again: each try costs seconds of a core


@dataclass(frozen=True)
class FollowedWeights:
    """Weights that there are. version: names them in `system_fingerprint`. fetch: their folder, made when called."""

    version: str
    fetch: Callable[[], Path]


class Followed:
    """A run's newest weights: of its last stage that has any, finished or not. stage: that one alone, "" for any.
    scratch: where folders are made from checkpoints of stages under way."""

    def __init__(self, store: Store, run: str, stage: str, scratch: Path) -> None:
        self._store, self._run, self._stage, self._scratch = store, run, stage, scratch

    def newest(self) -> FollowedWeights | None:
        """None where there are none yet."""
        record = self._store.read_run(self._run)
        for name, entry in reversed(record.stages.items()):
            if recorded_kind(entry.kind).makes != MODEL or self._stage not in ("", name):
                continue
            if entry.has_ended_well and entry.artifact is not None:
                key, attempt = entry.artifact
                artifact = self._store.attempt(key, attempt)
                return FollowedWeights(f"{name}@{key[:8]}/{attempt}", partial(self._store.materialize, artifact))
            if entry.key and entry.workspace and (steps := steps_in(Path(entry.workspace) / "checkpoints")):
                step, checkpoint = steps[-1]
                make = partial(self._of_checkpoint, Path(entry.workspace), checkpoint, f"{name}-{entry.key}-{step}")
                return FollowedWeights(f"{name}@{entry.key[:8]}:step-{step}", make)
        return None

    def first(self) -> FollowedWeights:
        """Raises ArtifactNotFound where there are none yet."""
        if (newest := self.newest()) is None:
            raise ArtifactNotFound(
                f"Run {self._run} has no weights yet: its first checkpoint is still to come. See how far it is with: "
                f"nanodag stages {self._run}"
            )
        return newest

    def drop(self, folder: Path) -> None:
        """Remove a folder that was made here and is of no use."""
        if folder.parent == self._scratch:
            shutil.rmtree(folder)

    def _of_checkpoint(self, workspace: Path, checkpoint: Path, name: str) -> Path:
        """A process of its own does it: it needs torch. Of the folders made before, the last one stays: engines that
        are started again begin with it."""
        made = sorted(self._scratch.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
        for path in made[:-1]:
            shutil.rmtree(path.parent)
        folder = self._scratch / name
        command = [sys.executable, "-m", "nanodag.train.checkpoint_model", str(workspace), str(checkpoint), str(folder)]
        safe = os.environ | {"PYTHONSAFEPATH": "1"}  # files of the working directory are no modules
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=safe, check=False)
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise SamplerError(f"{checkpoint} gives no model: {done.stderr.strip()[-500:]}")
        return folder


async def follow(followed: Followed, engines: Fleet, version: str) -> None:
    """Give the engines each new set of weights. version: what they have. What they refuse is passed over. What cannot
    be read is tried again, ever more seldom, and said once."""
    seen, told, pause_s = version, "", LOOK_EVERY_S
    while True:
        await asyncio.sleep(pause_s)
        try:
            newest = await in_thread(followed.newest)
            if newest is None or newest.version == seen:
                told, pause_s = "", LOOK_EVERY_S
                continue
            folder = await in_thread(newest.fetch)
            seen, told, pause_s = newest.version, "", LOOK_EVERY_S
        except (NanodagError, OSError) as error:  # it may be removed, or written, at this very moment
            if told != str(error):
                log.warning("Following: %s", error)
            told, pause_s = str(error), min(2 * pause_s, MAX_PAUSE_S)
            continue
        try:
            await engines.take_weights(folder, newest.version)
        except SamplerError as error:
            log.warning("%s keeps its weights: %s", engines.name, error)
            followed.drop(folder)
        else:
            print(f"{engines.name} answers with {newest.version} now.", flush=True)
