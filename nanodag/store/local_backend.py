"""A store's bytes on a local folder. An artifact becomes visible all at once, by rename()."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nanodag.errors import CorruptArtifact, StoreError
from nanodag.store.atomic import (
    bytes_below,
    copy_hashed,
    fsync_folders,
    fsync_path,
    is_leftover,
    sizes_below,
    temporary_name,
    write_bytes,
    writing,
)
from nanodag.store.manifest import MANIFEST, Artifact, manifest_text, parse_manifest

Parts = Mapping[str, Path | None]


class LocalBackend:
    """Everything below a local folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self, folder: str) -> list[str]:
        """Names in a folder; empty when there is none."""
        try:
            return os.listdir(self.root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def listing(self, folder: str) -> dict[str, int]:
        """As nanodag.store.atomic.sizes_below, for an artifact's folder. Raises CorruptArtifact when that is a link."""
        path = self.root / folder
        for place in (path, path.parent):
            if place.is_symlink():
                raise CorruptArtifact(f"{place} is a link; an artifact lies in its store.")
        return sizes_below(path)

    def read_text(self, path: str) -> str:
        """Raises FileNotFoundError."""
        return (self.root / path).read_text(encoding="utf-8")

    def read_texts(self, paths: list[str]) -> dict[str, str]:
        """The text of each that is there; bytes that are none become lone surrogates, which no parser takes."""
        texts = {}
        for path in paths:
            try:
                texts[path] = (self.root / path).read_text(encoding="utf-8", errors="surrogateescape")
            except FileNotFoundError:
                continue
        return texts

    def write_text(self, path: str, text: str) -> None:
        """Replace a small file; readers see the old text or the new one."""
        target = self.root / path
        with writing(f"Writing {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(target, text.encode())

    def remove(self, path: str) -> None:
        with writing(f"Removing {self.root / path}"):
            (self.root / path).unlink(missing_ok=True)

    def is_own(self, path: str) -> bool:
        """True when this user, or root, wrote that file."""
        return (self.root / path).lstat().st_uid in (os.geteuid(), 0)

    def fetch(self, artifact: Artifact) -> Path:
        return self.root / artifact.folder

    def forget(self, artifact: Artifact, path: str) -> bool:
        """Drop a damaged copy, to be fetched again; False where there is no other: this is the original."""
        return False

    def put(self, artifact: Artifact, parts: Parts, next_number: int) -> Artifact:
        """Fill a folder next to the final one, then give it its name: rename() onto another's attempt fails."""
        home = self.root / "artifacts" / artifact.key
        with writing(f"Publishing stage {artifact.stage} into {home}"):
            is_new = not home.exists()
            home.mkdir(parents=True, exist_ok=True)
            if home.is_symlink():
                raise StoreError(f"{home} is a link; nothing is published through one. Remove it.")
            if is_new:
                fsync_path(home.parent)
            with contextlib.suppress(FileNotFoundError):  # another process may just delete this key's last attempt
                for name in filter(is_leftover, os.listdir(home)):  # of processes that were killed while they published
                    shutil.rmtree(home / name, ignore_errors=True)
            temporary = home / temporary_name()
            try:
                _copy(artifact, parts, temporary)
                return self._settle(artifact, temporary, next_number)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

    def _settle(self, artifact: Artifact, temporary: Path, number: int) -> Artifact:
        while True:
            placed = replace(artifact, attempt=f"{number:04d}")
            write_bytes(temporary / MANIFEST, manifest_text(placed).encode())
            try:
                os.rename(temporary, self.root / placed.folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                number += 1  # another writer took that number meanwhile
                continue
            fsync_path(temporary.parent)
            return placed

    def hide(self, key: str, attempt: str) -> str:
        """Take an attempt out of sight, all at once; returns what `bring_back` or `delete` need.

        Raises FileNotFoundError when it is gone already."""
        home = self.root / "artifacts" / key
        if not (home / attempt).exists():
            raise FileNotFoundError(home / attempt)
        hidden = temporary_name()
        with writing(f"Removing {home / attempt}"):
            os.rename(home / attempt, home / hidden)
        return hidden

    def bring_back(self, key: str, attempt: str, hidden: str) -> str:
        """Undo `hide`; returns its attempt: the next free number where a builder has taken its own meanwhile."""
        home = self.root / "artifacts" / key
        try:
            os.rename(home / hidden, home / attempt)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return attempt
        artifact = parse_manifest((home / hidden / MANIFEST).read_text(encoding="utf-8"), key=key, attempt=attempt)
        return self._settle(artifact, home / hidden, int(attempt) + 1).attempt

    def delete(self, key: str, attempt: str, hidden: str) -> None:
        """Remove what `hide` took out of sight, and the key's folder when it was the last in it."""
        home = self.root / "artifacts" / key
        shutil.rmtree(home / hidden, ignore_errors=True)
        try:
            home.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise

    def set_aside(self, key: str, attempt: str) -> str:
        """Move an attempt to `damaged/`, where it no longer counts; returns where it is now."""
        target = self.root / "damaged" / f"{key}-{attempt}-{secrets.token_hex(2)}"
        with writing(f"Setting {key[:12]}/{attempt} aside"):
            target.parent.mkdir(exist_ok=True)
            os.rename(self.root / "artifacts" / key / attempt, target)
        return str(target)

    def leftovers(self) -> dict[str, int]:
        """Files that killed writers of this host left behind: path below the store -> bytes."""
        sizes = {}
        for path in (*self.root.glob("artifacts/*/.*.tmp"), *self.root.glob("runs/.*.tmp")):
            if is_leftover(path.name):
                num_bytes = bytes_below(path) if path.is_dir() else path.stat().st_size
                sizes[path.relative_to(self.root).as_posix()] = num_bytes
        return sizes

    def clear(self, leftover: str) -> None:
        path = self.root / leftover
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _copy(artifact: Artifact, parts: Parts, destination: Path) -> None:
    for part, folder in parts.items():
        for name, facts in getattr(artifact, part).items():
            assert folder is not None
            target = destination / part / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if copy_hashed(folder / name, target) != facts["sha256"]:
                raise StoreError(f"{folder / name} changed while it was published; nothing was. Publish it again.")
            target.chmod(0o444)
    fsync_folders(destination)
