"""A store's bytes: on a local folder, where an artifact becomes visible all at once, by rename(); or behind any fsspec
URL (`s3://bucket/prefix`, `memory://x`), with verified local copies.

An object store cannot rename, so every writer has a folder of its own, and the manifest, written last, makes it count.
"""

import contextlib
import errno
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from nanodag.errors import CorruptArtifact, MissingTool, NanodagError, StoreError
from nanodag.store import atomic
from nanodag.store.atomic import is_leftover, writing
from nanodag.store.manifest import MANIFEST, PARTS, Artifact, manifest_text, parse_manifest

Parts = Mapping[str, Path]
ABANDONED_AFTER_S = 7 * 24 * 3600.0
# They have no folders: making one would ask for the bucket each time, or even make it.
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss"}


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
        return atomic.sizes_below(path)

    def read_text(self, path: str) -> str:
        """A file's text; bytes that are none become lone surrogates, for no parser. Raises FileNotFoundError."""
        return (self.root / path).read_text(encoding="utf-8", errors="surrogateescape")

    def read_texts(self, paths: list[str]) -> dict[str, str]:
        """The text of each that is there."""
        texts = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                texts[path] = self.read_text(path)
        return texts

    def write_text(self, path: str, text: str) -> None:
        """Replace a small file; readers see the old text or the new one."""
        target = self.root / path
        with writing(f"Writing {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_bytes(target, text.encode())

    def remove(self, path: str) -> None:
        with writing(f"Removing {self.root / path}"):
            (self.root / path).unlink(missing_ok=True)

    def is_own(self, path: str) -> bool:
        """True when this user, or root, wrote that file."""
        return (self.root / path).lstat().st_uid in (os.geteuid(), 0)

    def fetch(self, artifact: Artifact, part: str) -> Path:
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
                atomic.fsync_path(home.parent)
            with contextlib.suppress(FileNotFoundError):  # another process may just delete this key's last attempt
                for name in filter(is_leftover, os.listdir(home)):  # of processes that were killed while they published
                    shutil.rmtree(home / name, ignore_errors=True)
            temporary = home / atomic.temporary_name()
            try:
                _copy(artifact, parts, temporary)
                return self._settle(artifact, temporary, next_number)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

    def _settle(self, artifact: Artifact, temporary: Path, number: int) -> Artifact:
        while True:
            placed = replace(artifact, attempt=f"{number:04d}")
            atomic.write_bytes(temporary / MANIFEST, manifest_text(placed).encode())
            try:
                os.rename(temporary, self.root / placed.folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                number += 1  # another writer took that number meanwhile
                continue
            atomic.fsync_path(temporary.parent)
            return placed

    def hide(self, key: str, attempt: str) -> str:
        """Take an attempt out of sight, all at once; returns what `bring_back` or `delete` need.

        Raises FileNotFoundError when it is gone already."""
        home = self.root / "artifacts" / key
        if not (home / attempt).exists():
            raise FileNotFoundError(home / attempt)
        hidden = atomic.temporary_name()
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
                num_bytes = atomic.bytes_below(path) if path.is_dir() else path.stat().st_size
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
            target = destination / part / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if atomic.copy_hashed(folder / name, target) != facts["sha256"]:
                raise StoreError(f"{folder / name} changed while it was published; nothing was. Publish it again.")
            target.chmod(0o444)
    atomic.fsync_folders(destination)


class RemoteBackend:
    """Everything below an fsspec URL, by the methods of LocalBackend. cache: local folder for copies."""

    def __init__(self, url: str, cache: Path) -> None:
        import fsspec

        self._url = url
        try:
            self._fs, root = fsspec.url_to_fs(url)
        except ImportError as error:
            raise MissingTool(
                f"The store {url} needs a package that is not installed ({error}). For s3: pip install 'nanodag[s3]'."
            ) from error
        except (OSError, ValueError, TypeError) as error:  # no such host, no host at all, no such kind
            raise StoreError(
                f"The store's URL {url!r} cannot be used ({error}). Set another with store.url=URL."
            ) from error
        self._root = root.rstrip("/")
        self._cache = cache
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._has_folders = not protocols & _WITHOUT_FOLDERS

    def names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            with self._asking(f"Listing {folder}"):
                entries = self._fs.ls(f"{self._root}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        return [str(e).rstrip("/").rsplit("/", 1)[-1] for e in entries]

    def listing(self, folder: str) -> dict[str, int]:
        """As LocalBackend.listing, in one request."""
        return {path: int(facts["size"]) for path, facts in self._found(folder).items()}

    def _found(self, folder: str) -> dict[str, dict[str, Any]]:
        """Path below a folder -> what the file system says of the file."""
        self._fs.invalidate_cache()
        base = f"{self._root}/{folder}"
        with self._asking(f"Listing {folder}"):
            listing = self._fs.find(base, detail=True)
        return {path[len(base) + path.index(base) + 1 :]: facts for path, facts in listing.items()}

    def read_text(self, path: str) -> str:
        with self._asking(f"Reading {path}"):
            return self._fs.cat_file(f"{self._root}/{path}").decode(errors="surrogateescape")

    def read_texts(self, paths: list[str]) -> dict[str, str]:
        """As LocalBackend.read_texts, side by side where the file system can."""
        if not paths:
            return {}
        full_paths = {f"{self._root}/{path}": path for path in paths}
        with self._asking(f"Reading {len(paths)} files"):
            blobs = self._fs.cat(list(full_paths), on_error="return")
            if lost := [b for b in blobs.values() if isinstance(b, Exception) and not isinstance(b, FileNotFoundError)]:
                raise lost[0]  # not taken for a file that is not there: `gc` would remove what it names
        texts = {path: blobs[full] for full, path in full_paths.items() if isinstance(blobs.get(full), bytes)}
        return {path: text.decode(errors="surrogateescape") for path, text in texts.items()}

    def write_text(self, path: str, text: str) -> None:
        """As LocalBackend.write_text: an object store replaces objects whole, a file system gives them another name."""
        target = f"{self._root}/{path}"
        with self._asking(f"Writing {path}"):
            if not self._has_folders:
                self._fs.pipe_file(target, text.encode())
                return
            folder, _, name = target.rpartition("/")
            temporary = f"{folder}/.{name}.{secrets.token_hex(4)}.tmp"
            self._make_parent(target)
            self._fs.pipe_file(temporary, text.encode())
            self._fs.mv(temporary, target)

    def remove(self, path: str) -> None:
        with self._asking(f"Removing {path}"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{path}")

    def is_own(self, path: str) -> bool:
        """True: an object store does not say who wrote what; whoever may write to it is trusted with runs' records."""
        return True

    def fetch(self, artifact: Artifact, part: str) -> Path:
        """A local copy of the artifact's folder with its `files` or `records`; files that are there in their size
        already are not pulled again."""
        folder = self._cache / artifact.key / artifact.attempt
        for name, facts in getattr(artifact, part).items():
            target = folder / part / name
            if not target.is_file() or target.is_symlink() or target.stat().st_size != facts["bytes"]:
                self.pull(f"{artifact.folder}/{part}/{name}", target)
        atomic.write_bytes(folder / MANIFEST, manifest_text(artifact).encode())
        return folder

    def forget(self, artifact: Artifact, path: str) -> bool:
        (self._cache / artifact.key / artifact.attempt / path).unlink(missing_ok=True)
        return True

    def pull(self, path: str, target: Path) -> None:
        """Bring a file here; it is whole when it has its name. Raises CorruptArtifact when there is none."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self._cache.mkdir(parents=True, exist_ok=True)
        partial = self._cache / f".partial-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with self._asking(f"Pulling {path}"):
                self._fs.get_file(f"{self._root}/{path}", str(partial))
            os.replace(partial, target)
        except FileNotFoundError as error:
            raise CorruptArtifact(f"{path} is missing in {self._url}, though its manifest names it.") from error
        finally:
            partial.unlink(missing_ok=True)

    def put(self, artifact: Artifact, parts: Parts, next_number: int) -> Artifact:
        """Fill a folder of this writer's own, look at what arrived, then write the manifest."""
        placed = replace(artifact, attempt=f"{next_number:04d}-{secrets.token_hex(4)}")
        for part, folder in parts.items():
            for name in getattr(placed, part):
                self.push(folder / name, f"{placed.folder}/{part}/{name}")
        arrived = self.listing(placed.folder)
        for part in PARTS:
            for name, facts in getattr(placed, part).items():
                if arrived.get(f"{part}/{name}") != facts["bytes"]:
                    raise StoreError(
                        f"{name} of stage {artifact.stage} did not arrive whole in {self._url}: "
                        f"{arrived.get(f'{part}/{name}')} bytes of {facts['bytes']}. Publish it again."
                    )
        self.write_text(f"{placed.folder}/{MANIFEST}", manifest_text(placed))
        return placed

    def push(self, source: Path, path: str) -> None:
        """Copy a file there. Raises StoreError when that fails, FileNotFoundError when there is no `source`."""
        target = f"{self._root}/{path}"
        with self._asking(f"Writing {path}"):
            self._make_parent(target)
            self._fs.put_file(str(source), target)

    def hide(self, key: str, attempt: str) -> str:
        """As LocalBackend.hide: without its manifest an attempt does not count."""
        path = f"artifacts/{key}/{attempt}/{MANIFEST}"
        try:
            text = self.read_text(path)
        except FileNotFoundError:
            return ""
        self.remove(path)
        return text

    def bring_back(self, key: str, attempt: str, hidden: str) -> str:
        """As LocalBackend.bring_back; no two writers have the same number."""
        if hidden:
            self.write_text(f"artifacts/{key}/{attempt}/{MANIFEST}", hidden)
        return attempt

    def delete(self, key: str, attempt: str, hidden: str) -> None:
        self.clear(f"artifacts/{key}/{attempt}")

    def set_aside(self, key: str, attempt: str) -> str:
        """As LocalBackend.set_aside: its manifest is given another name."""
        path = f"artifacts/{key}/{attempt}/{MANIFEST}"
        aside = f"{path}.damaged-{secrets.token_hex(2)}"
        with self._asking(f"Setting {key[:12]}/{attempt} aside"):
            self._fs.copy(f"{self._root}/{path}", f"{self._root}/{aside}")
        self.remove(path)
        return f"{self._url}/{aside}"

    def leftovers(self) -> dict[str, int]:
        """Attempts without a manifest that nobody has written to for a week: folder -> bytes."""
        sizes: dict[str, int] = {}
        newest: dict[str, float] = {}
        whole = set()
        for path, facts in self._found("artifacts").items():
            folder = "/".join(["artifacts", *path.split("/")[:2]])
            if path.endswith(f"/{MANIFEST}"):
                whole.add(folder)
            sizes[folder] = sizes.get(folder, 0) + int(facts["size"])
            newest[folder] = max(newest.get(folder, 0.0), _written(facts))
        limit = time.time() - ABANDONED_AFTER_S
        return {folder: size for folder, size in sizes.items() if folder not in whole and newest[folder] < limit}

    def clear(self, leftover: str) -> None:
        with self._asking(f"Removing {leftover}"), contextlib.suppress(FileNotFoundError):
            self._fs.rm(f"{self._root}/{leftover}", recursive=True)

    def _make_parent(self, target: str) -> None:
        if self._has_folders:
            self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Make one StoreError of what a driver raises; FileNotFoundError stays, but for a missing bucket."""
        try:
            yield
        except NanodagError:
            raise
        except FileNotFoundError as error:
            if not self._has_folders and _is_of_a_bucket(error):
                bucket = self._root.partition("/")[0]
                raise StoreError(
                    f"There is no bucket {bucket!r} (store.url is {self._url}). Make it, or set another with "
                    "store.url=URL."
                ) from error
            raise
        except _driver_errors() as error:
            raise StoreError(
                f"{what} in {self._url} failed ({type(error).__name__}: {error}). Look at address, credentials and "
                "network; nothing that was there before was touched."
            ) from error


def _is_of_a_bucket(error: FileNotFoundError) -> bool:
    """True when what is missing is the bucket, as S3's driver has it in the error's cause, others in its text."""
    answer = getattr(error.__cause__, "response", {}).get("Error", {})
    return answer.get("Code") == "NoSuchBucket" or "bucket does not exist" in str(error)


def _driver_errors() -> tuple[type[Exception], ...]:
    """Exceptions that the drivers that are loaded raise, OSError among them."""
    errors: list[type[Exception]] = [OSError]
    if "botocore.exceptions" in sys.modules:
        errors += [sys.modules["botocore.exceptions"].BotoCoreError, sys.modules["botocore.exceptions"].ClientError]
    if "aiohttp" in sys.modules:
        errors.append(sys.modules["aiohttp"].ClientError)
    return tuple(errors)


def _written(facts: dict[str, Any]) -> float:
    """Seconds since 1970 at which a file was written, as its file system says; the far future where it does not."""
    value = facts.get("LastModified", facts.get("created", facts.get("mtime")))
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, int | float) else float("inf")
