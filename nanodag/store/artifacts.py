"""Artifacts: immutable, content-hashed outputs of finished stages, on a local path or any fsspec URL.

Layout:
    <store>/artifacts/<key>/<attempt>/manifest.json     written last: it exists means that the artifact is complete
                                                        (a remote attempt's name ends in the writer's random digits)
    <store>/artifacts/<key>/<attempt>/files/...         the product; its content digest feeds downstream keys
    <store>/artifacts/<key>/<attempt>/records/...       logs and metrics; hashed, but not part of the content digest
    <store>/runs/<run>.json                             what a run asked for and which artifact each stage took
    <store>/checkpoints/<key>/<step>/...                checkpoints of a stage under way, mirrored to a remote store
    <store>/damaged/                                    attempts that `nanodag verify --set-aside` took out of the way
    <local>/work/<key>/                                 workspace of a stage under way (always local)
    <local>/locks/                                      who builds what on this host
    <local>/held_out/                                   packed validation rows, the eight used last
    <local>/cache/<key>/<attempt>/                      verified local copies, when the store is remote
    <local>/cache/<key>/<attempt>/merged/               the model of an attempt that holds adapters alone
"""

import json
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from nanodag.errors import ArtifactNotFound, CorruptArtifact, NewerFormat, StoreError
from nanodag.host.folders import PRIVATE, user_cache
from nanodag.store import manifest
from nanodag.store.atomic import hashes_below, locked, sha256_of, sizes_below, write_json, writing
from nanodag.store.backends import LocalBackend, RemoteBackend
from nanodag.store.checkpoints import Mirror
from nanodag.store.manifest import MANIFEST, Artifact, check_listing
from nanodag.store.run_record import RunRecord, parse_record

log = logging.getLogger(__name__)

MERGED = "merged"
POSITIONS = ("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters")  # of a config.json
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


class Store:
    """Artifacts, runs and workspaces below one URL.

    url: a local path or an fsspec URL (`s3://bucket/prefix`, `memory://x`). local: folder for workspaces, locks and
    the cache of a remote store; for a local store it is the store itself.
    """

    def __init__(self, url: str | Path, *, local: Path | None = None) -> None:
        self.url = str(url)
        self.is_remote = "://" in self.url and not self.url.startswith("file://")
        self.backend: LocalBackend | RemoteBackend
        if self.is_remote:
            self.local = (local or user_cache()).absolute()
            self.backend = RemoteBackend(self.url, self.local / "cache")
        else:
            self.local = Path(self.url.removeprefix("file://")).absolute()
            self.backend = LocalBackend(self.local)
        try:
            self.local.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"The store's folder {self.local} cannot be made ({error}). Choose another with store.url=PATH."
            ) from error

    def lookup(self, key: str) -> Artifact | None:
        """The newest attempt under a key that has a readable manifest and all its files in their recorded sizes.

        Newest is the highest number, whatever clocks say. Raises NewerFormat when there is none that counts, but one
        that only a newer nanodag reads: building it again would waste what is there.
        """
        newer: NewerFormat | None = None
        for attempt in reversed(self.attempts(key)):
            try:
                return self._read_manifest(key, attempt)
            except FileNotFoundError:  # half a write: another process is at it, or was killed
                continue
            except NewerFormat as error:
                newer = newer or error
            except CorruptArtifact as error:
                log.warning("%s It does not count as done.", error)
        if newer is not None:
            raise newer
        return None

    def attempt(self, key: str, attempt: str) -> Artifact:
        """Attempt of that name. Raises ArtifactNotFound when it is not there, CorruptArtifact when it is damaged,
        NewerFormat when only a newer nanodag reads it."""
        try:
            return self._read_manifest(key, attempt)
        except FileNotFoundError:
            raise ArtifactNotFound(f"There is no attempt {attempt} of key {key} in {self.url}.") from None

    def check_own(self, artifact: Artifact) -> None:
        """Raise StoreError for another user's artifact that is about to be acted upon: its config may name code."""
        if not self.backend.is_own(f"{artifact.folder}/{MANIFEST}"):
            raise StoreError(
                f"Artifact {artifact.folder} in {self.url} was written by another user, and running its stage "
                "would run the code that it names. Build it in a run of your own, then reproduce that."
            )

    def get(self, key_prefix: str) -> Artifact:
        """The artifact whose key begins so; `ab12/0002` is its attempt 0002, `RUN:STAGE` what a run's stage took.

        Raises ArtifactNotFound when none, or more than one, does.
        """
        if ":" in key_prefix:
            run, _, stage = key_prefix.partition(":")
            entry = self.read_run(run).stages.get(stage)
            if entry is None or entry.artifact is None:
                raise ArtifactNotFound(f"Run {run} has no finished stage {stage!r}.")
            return self.attempt(*entry.artifact)
        prefix, _, attempt = key_prefix.partition("/")
        key = self.find_key(prefix)
        artifact = self.attempt(key, attempt) if attempt else self.lookup(key)
        if artifact is None:
            raise ArtifactNotFound(
                f"Key {key} in {self.url} has no valid attempt; see why with: nanodag verify {key[:12]}"
            )
        return artifact

    def find_key(self, prefix: str) -> str:
        """The key that begins so. Raises ArtifactNotFound when none, or more than one, does."""
        keys = [k for k in self.keys() if k.startswith(prefix)] if prefix else []
        if len(keys) != 1:
            names = ", ".join(k[: len(prefix) + 8] for k in keys[:5]) or "none"
            raise ArtifactNotFound(
                f"{len(keys)} keys in {self.url} begin with {prefix!r} ({names}), and no run is called so; give more "
                "of it. Runs are listed by: nanodag status"
            )
        return keys[0]

    def keys(self, folder: str = "artifacts") -> list[str]:
        """Every key that has at least one attempt; in the folder `checkpoints`, every one with mirrored checkpoints."""
        return sorted(n for n in self.backend.names(folder) if SAFE_NAME.fullmatch(n))

    def attempts(self, key: str) -> list[str]:
        """Names of the attempts under a key, oldest first, whether they are whole or not."""
        return sorted(n for n in self.backend.names(f"artifacts/{safe_name(key)}") if manifest.ATTEMPT.fullmatch(n))

    def address(self, artifact: Artifact) -> str:
        """URL of an artifact for who is not of this store; without the login that the store's own may bear."""
        root = re.sub("(?<=://)[^/]*@", "", self.url).rstrip("/") if self.is_remote else self.local.as_uri()
        return f"{root}/{artifact.folder}"

    def materialize(self, artifact: Artifact) -> Path:
        """A local folder with the artifact's files as `verified` has them; where these are adapters alone, with their
        model, which is merged once. Raises ArtifactNotFound when what they adapt is gone, or has other content."""
        adapter = self.verified(artifact, "files")
        if not artifact.is_adapter:
            return adapter
        home = self.local / "cache" / artifact.key / artifact.attempt
        folder, sums = home / MERGED, home / f"{MERGED}.json"
        with locked(self.local / "locks" / f"merge-{artifact.key}.lock", timeout_s=24 * 3600.0) as lock:
            if sums.exists() and json.loads(sums.read_text()) == hashes_below(folder):
                os.utime(home)  # `gc` leaves it alone for a while
                return folder
            base = self.materialize(self.source(artifact, "model"))
            command = [sys.executable, "-m", "nanodag.model.adapter_folder", str(base), str(adapter), str(folder)]
            # A process, as it needs torch. It holds the lock, too, should this one be killed.
            safe = os.environ | {"PYTHONSAFEPATH": "1"}  # files of the working directory are no modules
            done = subprocess.run(command, capture_output=True, text=True, pass_fds=(lock,), env=safe, check=False)
            if done.returncode:
                why = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
                raise StoreError(f"The adapters of {artifact.folder} were not merged: {why}")
            if done.stdout:
                log.warning("%s: %s", artifact.folder, done.stdout.strip())
            write_json(sums, hashes_below(folder))
        return folder

    def apart(self, artifact: Artifact) -> tuple[Path, Path | None]:
        """Local folders of a model and of adapters over it, where an artifact is these alone and was trained as the
        model is declared; else its own, and None. Raises as `materialize`."""
        if artifact.is_adapter:
            folders = self.materialize(self.source(artifact, "model")), self.verified(artifact, "files")
            declared = [json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in folders]
            if all(declared[0].get(name) == declared[1].get(name) for name in POSITIONS):
                return folders
        return self.materialize(artifact), None

    def source(self, artifact: Artifact, label: str) -> Artifact:
        """The attempt that was an artifact's input, or another of its key with the same content. Raises
        ArtifactNotFound."""
        of = artifact.lineage[label]
        key, attempt = str(of["key"]), str(of["attempt"])
        for name in [attempt, *self.attempts(key)]:
            try:
                found = self.attempt(key, name)
            except StoreError:  # gone or damaged: another may do
                continue
            if found.digest == of["digest"]:
                return found
        raise ArtifactNotFound(
            f"The input {of['stage']} of {artifact.folder} (key {key[:12]}, content {of['digest'][:12]}) is not in "
            f"{self.url} any more. Build that stage first, from the run that this artifact is of."
        )

    def publish(self, key: str, files: Path, *, stage: str, records: Path | None = None, **about: Any) -> Artifact:
        """Add one attempt under a key: copy the files, then the manifest, visible all at once.

        `files` and `records` stay where they are. Nothing that was published before is touched. about: kind, config,
        lineage, sources, metrics, cost and environment of the manifest (Artifact). Raises StoreError when there is
        nothing to publish.
        """
        parts = {"files": files} if records is None else {"files": files, "records": records}
        hashes = {part: hashes_below(folder) for part, folder in parts.items()}
        if not hashes["files"]:
            raise StoreError(f"Stage {stage} left no files in {files}; there is nothing to publish.")
        artifact = Artifact(
            format=manifest.FORMAT_VERSION,
            key=safe_name(key),
            attempt="",
            stage=stage,
            digest=manifest.content_digest({n: f["sha256"] for n, f in hashes["files"].items()}),
            files=hashes["files"],
            records=hashes.get("records", {}),
            created=time.time(),
            **about,
        )
        last = max((int(attempt[:4]) for attempt in self.attempts(key)), default=0)
        return self.backend.put(artifact, parts, last + 1)

    def mirror(self, key: str, folder: Path) -> Mirror:
        """Copier of the checkpoints of a key's stage to a remote store. Raises StoreError when it is local."""
        if not isinstance(self.backend, RemoteBackend):
            raise StoreError(f"The store {self.url} is local: checkpoints in it are there already, nothing to mirror.")
        return Mirror(self.backend, safe_name(key), folder)

    def delete(self, key: str, attempt: str, hidden: str) -> None:
        """Remove what the back end's `hide` took out of sight, and this host's copy of it."""
        self.backend.delete(safe_name(key), safe_name(attempt), hidden)
        self._drop_copy(key, attempt)

    def set_aside(self, key: str, attempt: str) -> str:
        """Move a damaged attempt to where it does not count, and remove this host's copy of it; returns where it is."""
        with self.building(key, timeout_s=0.0):
            where = self.backend.set_aside(safe_name(key), safe_name(attempt))
        self._drop_copy(key, attempt)
        return where

    def _drop_copy(self, key: str, attempt: str) -> None:
        shutil.rmtree(self.local / "cache" / key / attempt, ignore_errors=True)

    def workspace(self, key: str) -> Path:
        """The folder in which a stage of this key works; kept until its result is published.

        Raises StoreError when it is another user's, or anybody may write there: a worker does what its job.json says.
        """
        folder = self.local / "work" / safe_name(key)
        with writing(f"Making the workspace {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & stat.S_IWOTH:
            raise StoreError(
                f"The workspace {folder} is not this user's alone (owner {facts.st_uid}, mode "
                f"{stat.S_IMODE(facts.st_mode):o}, this user {os.geteuid()}): a worker would do what somebody else "
                "wrote there. Remove it, or choose another store with store.url=PATH."
            )
        return folder

    def discard_workspace(self, key: str) -> None:
        shutil.rmtree(self.local / "work" / safe_name(key), ignore_errors=True)

    def building(
        self, key: str, *, timeout_s: float = 24 * 3600.0, give_up: Callable[[], bool] = lambda: False
    ) -> AbstractContextManager[int]:
        """Hold the right to build a key on this host; waits for another builder, who may publish it meanwhile.

        Yields the lock's file descriptor: the lock goes when the last process that holds it ends, so a killed builder
        leaves none behind, and a worker that is still ending keeps it. Raises StoreBusy after timeout_s,
        or once give_up() says so.
        """
        return locked(self.local / "locks" / f"{safe_name(key)}.lock", timeout_s=timeout_s, give_up=give_up)

    def write_run(self, record: RunRecord) -> RunRecord:
        """Write or replace a run's record while no other process on this host changes it; returns it with its number.

        A new run gets the next `number`. Raises StoreError for a name that could leave the folder, or when the record
        that is there cannot be read: what it keeps alive is not known.
        """
        with self._changing(record.run):
            before = self.find_run(record.run)
            if before is not None:
                return self._write(record.changed(number=before.number))
            last = max((other.number for other in self._records()[0].values()), default=0)
            return self._write(record.changed(number=last + 1))

    def change_run(self, run: str, change: Callable[[RunRecord], RunRecord]) -> RunRecord:
        """Replace a run's record by what `change` makes of it, while no other process on this host changes it; returns
        the new one."""
        with self._changing(run):
            return self._write(change(self.read_run(run)))

    def find_run(self, run: str) -> RunRecord | None:
        """A run's record, or None where there is none. Raises StoreError when it cannot be read (parse_record)."""
        text = self.backend.read_texts([_path(run)]).get(_path(run))
        return parse_record(text, run, self.url) if text is not None else None

    def read_run(self, run: str) -> RunRecord:
        """A run's record. Raises ArtifactNotFound naming the runs there are, StoreError when it cannot be read."""
        record = self.find_run(run)
        if record is None:
            newest = ", ".join(self.runs()[-5:]) or "none yet"
            raise ArtifactNotFound(f"There is no run {run!r} in {self.url}. Newest runs: {newest}.")
        return record

    def own_run(self, run: str) -> RunRecord:
        """`read_run` of a record that is about to be acted upon: it names a pipeline file, and code.

        Raises StoreError when another user wrote it.
        """
        if not self.backend.is_own(_path(run)):
            raise StoreError(
                f"The record of run {run} in {self.url} was written by another user, and resuming it would run "
                "the code that it names. Start a run of your own: what is in the store is found."
            )
        return self.read_run(run)

    def runs(self) -> list[str]:
        """Names of all runs that have a readable record, oldest first."""
        return list(self.records_of_runs())

    def records_of_runs(self, *, needs_all: bool = False) -> dict[str, RunRecord]:
        """Every readable record by its run's name, oldest first; a warning names each other one. needs_all: raise
        StoreError instead, naming the first one that cannot be read."""
        records, unreadable = self._records()
        for error in unreadable.values():
            if needs_all:
                raise error
            log.warning("%s It is passed over.", error)
        return records

    def unreadable_runs(self) -> dict[str, StoreError]:
        """Runs whose record cannot be read: name -> why."""
        return self._records()[1]

    def remove_run(self, run: str, *, started: float | None = None) -> bool:
        """Remove a run's record; what it made stays until `gc`. False, and it stays, where it was begun last at
        `started` and somebody has begun to resume it since."""
        with self._changing(run):
            record = self.find_run(run) if started is not None else None
            if record is not None and (record.state == "running" or record.started != started):
                return False
            self.backend.remove(_path(run))
        return True

    def _changing(self, run: str) -> AbstractContextManager[int]:
        return locked(self.local / "locks" / f"run-{safe_name(run)}.lock", timeout_s=60.0, poll_s=0.01)

    def _write(self, record: RunRecord) -> RunRecord:
        self.backend.write_text(_path(record.run), json.dumps(record.model_dump(mode="json"), indent=1))
        return record

    def _records(self) -> tuple[dict[str, RunRecord], dict[str, StoreError]]:
        """Records by their run's name, oldest first, and why each other one cannot be read."""
        records: dict[str, RunRecord] = {}
        unreadable: dict[str, StoreError] = {}
        names = [n for n in self.backend.names("runs") if n.endswith(".json") and SAFE_NAME.fullmatch(n)]
        for path, text in self.backend.read_texts([f"runs/{name}" for name in names]).items():
            run = Path(path).stem
            try:
                records[run] = parse_record(text, run, self.url)
            except StoreError as error:
                unreadable[run] = error
        return dict(sorted(records.items(), key=lambda item: (item[1].number, item[1].created))), unreadable

    def _read_manifest(self, key: str, attempt: str) -> Artifact:
        """Raises FileNotFoundError where there is no manifest, CorruptArtifact where it does not fit its files."""
        folder = f"artifacts/{safe_name(key)}/{safe_name(attempt)}"
        try:
            sizes = self.backend.listing(folder)
            artifact = manifest.parse_manifest(self.backend.read_text(f"{folder}/{MANIFEST}"), key=key, attempt=attempt)
        except PermissionError as error:
            raise StoreError(f"{self.url}: {error}. This user may not read that artifact.") from error
        check_listing(artifact, sizes)
        return artifact

    def verified(self, artifact: Artifact, part: str) -> Path:
        """A local folder with the artifact's `files` or `records` (metrics.jsonl, worker.log), each verified against
        its sha256; pulled first when remote. Raises CorruptArtifact naming the file whose bytes differ."""
        folder = self.backend.fetch(artifact, part)
        check_listing(artifact, sizes_below(folder), (part,))
        for name, facts in getattr(artifact, part).items():
            path = folder / part / name
            digest = sha256_of(path)
            if digest != facts["sha256"] and self.backend.forget(artifact, f"{part}/{name}"):
                self.backend.fetch(artifact, part)  # the copy here may have gone bad while the original has not
                digest = sha256_of(path)
            if digest != facts["sha256"]:
                raise CorruptArtifact(
                    f"Artifact {artifact.folder} in {self.url}: the bytes of {path} (sha256 {digest[:12]}) differ from "
                    f"their recorded sha256 {facts['sha256'][:12]}. Take it out of the way with: nanodag verify "
                    f"{artifact.key[:12]} --set-aside; stage {artifact.stage} is then rebuilt by the next run."
                )
        return folder / part


def _path(run: str) -> str:
    return f"runs/{safe_name(run)}.json"


def safe_name(name: str) -> str:
    """The name, when it can be one of a folder or file in the store. Raises StoreError for all others."""
    if not SAFE_NAME.fullmatch(name):
        raise StoreError(f"{name!r} is not a name the store can use: letters, digits, '.', '_' and '-', at most 128.")
    return name
