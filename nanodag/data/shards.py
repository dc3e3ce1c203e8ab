"""Shards: the parquet files of a remote data set, each fetched whole when its turn comes.

How many rows a shard has is known once it is here, so a pass over thousands of them needs no more than their names.
What was fetched stays in the cache folder, so that a restart finds it: the files used longest ago make room, and
together they take MOST_BYTES at most, or half of what the disk has left for them.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanodag.data.files import FileSource
from nanodag.data.formats import ParquetFile
from nanodag.data.sources import Row, Source
from nanodag.errors import SourceError
from nanodag.host.folders import cache_folder

log = logging.getLogger(__name__)

MOST_BYTES = 32 << 30
ROWS_OF_A_SHARD = 10**9  # a row's number is that of its shard times this, plus its place there
_ATTEMPTS = 5


@dataclass(frozen=True)
class RemoteFile:
    """One file by its fsspec URL, which names one content for ever. num_bytes: its size; 0 where nobody says."""

    url: str
    num_bytes: int

    def fetch(self) -> Path:
        """The file on this machine, fetched unless it is here; another process that fetches it is waited for.

        Raises SourceError when it cannot be had, after five attempts.
        """
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        files, remote = url_to_fs(self.url)
        if isinstance(files, LocalFileSystem):
            return Path(remote)
        folder = cache_folder() / "shards"
        target = folder / f"{hashlib.sha256(self.url.encode()).hexdigest()[:16]}-{Path(remote).name}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while not _is_used_now(target):
                self._fetch(files, remote, target)
        except OSError as error:
            raise SourceError(
                f"{self.url} cannot be fetched into {folder}: {type(error).__name__} {error}. Check the network and "
                "the disk (NANODAG_CACHE names another folder); a restart goes on from here."
            ) from error
        return target

    def fetch_ahead(self) -> None:
        """Fetch it beside other work. Whoever opens it waits for that, and hears of what went wrong."""
        threading.Thread(target=self._try_to_fetch, name="shard-ahead", daemon=True).start()

    def open(self) -> Source:
        """Its rows, in blocks; they stay readable when the cache lets the file go."""
        return FetchedSource([self])

    def _try_to_fetch(self) -> None:
        try:
            self.fetch()
        except SourceError as error:
            log.warning("Ahead of its turn: %s", error)

    def _fetch(self, files: Any, remote: str, target: Path) -> None:
        """One process writes the temporary file, whose lock the others wait for, and gives it its name."""
        import tenacity

        temporary = target.with_name(f"{target.name}.tmp")
        with temporary.open("ab") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if not _is_at(held.fileno(), temporary):  # who held the lock before has made it the target
                return
            if target.exists():  # and did so before it was opened here
                temporary.unlink()
                return
            make_room(target.parent, self.num_bytes)
            attempts = tenacity.Retrying(
                stop=tenacity.stop_after_attempt(_ATTEMPTS),
                wait=tenacity.wait_exponential(max=30),
                retry=tenacity.retry_if_not_exception_type((FileNotFoundError, PermissionError)),
                reraise=True,
            )
            try:
                attempts(self._copy, files, remote, temporary)
            except Exception as error:  # of whichever library speaks that protocol
                raise OSError(f"{type(error).__name__} {error}") from error
            os.rename(temporary, target)

    def _copy(self, files: Any, remote: str, temporary: Path) -> None:
        files.get_file(remote, str(temporary))
        if self.num_bytes and temporary.stat().st_size != self.num_bytes:
            raise OSError(f"{temporary.stat().st_size} of {self.num_bytes} bytes came")


class FetchedSource(FileSource):
    """The rows of shards that are fetched now. Their files are held open: the cache may remove their names."""

    def __init__(self, shards: Sequence[RemoteFile]) -> None:
        files: list[ParquetFile] = []
        for shard in shards:
            files.append(ParquetFile(shard.fetch(), is_held=True))
            files[-1].blocks()  # opens it
        super().__init__([file.path for file in files])
        self._files = [*files]


class ShardedSource(Source):
    """Rows of shards that are fetched one after the other."""

    def __init__(self, shards: Sequence[RemoteFile]) -> None:
        self._shards = shards

    def identity(self) -> dict[str, Any]:
        return {"kind": "shards", "urls": [shard.url for shard in self._shards]}

    def shards(self) -> Sequence[RemoteFile]:
        return self._shards

    def rows(self, start: int = 0, shard: int = 0, num_shards: int = 1) -> Iterator[tuple[int, Row]]:
        for number in range(start // ROWS_OF_A_SHARD, len(self._shards)):
            first = number * ROWS_OF_A_SHARD
            for index, row in self._shards[number].open().rows(max(0, start - first)):
                if (first + index) % num_shards == shard:
                    yield first + index, row

    def apart(self) -> tuple[Source, Source] | None:
        if len(self._shards) < 2:
            return self._shards[0].open().apart()
        return ShardedSource(self._shards[:-1]), ShardedSource(self._shards[-1:])


def make_room(folder: Path, num_bytes: int) -> None:
    """Remove the files used longest ago until that many bytes more stay within the bound."""
    files = []
    for path in folder.iterdir():
        try:
            facts = path.stat()
        except FileNotFoundError:  # another process makes room, too
            continue
        files.append((facts.st_mtime, facts.st_size, path))
    total = sum(size for _, size, _ in files)
    most = min(MOST_BYTES, (total + shutil.disk_usage(folder).free) // 2)
    for _, size, path in sorted(files):
        if total + num_bytes <= most:
            return
        if path.suffix != ".tmp":  # somebody may be writing it
            path.unlink(missing_ok=True)
            total -= size


def _is_used_now(path: Path) -> bool:
    """True when the file is there; its time says that it was used just now."""
    with suppress(FileNotFoundError):
        os.utime(path)
        return True
    return False


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
