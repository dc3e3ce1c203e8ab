"""sha256 of files, remembered by path, size and modification time so that unchanged data is hashed once."""

import functools
import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from nanodag.errors import SourceError
from nanodag.host.folders import cache_folder


def file_sha256(path: Path) -> str:
    """64 hex digits of a file's content."""
    path, status = path.resolve(), path.stat()
    return remembered_sha256(path, f"{path}|{status.st_size}|{status.st_mtime_ns}")


def remembered_sha256(path: Path, key: str) -> str:
    """The digest that is remembered under a key, such as a URL; else a file's, remembered from now on.

    `digests.jsonl` in the cache folder remembers digests between processes, which may append to it at the same time.
    """
    cache_path = cache_folder() / "digests.jsonl"
    known = _remembered(cache_path)
    if key not in known:
        with path.open("rb") as content:
            known[key] = hashlib.file_digest(content, "sha256").hexdigest()
        line = json.dumps({"key": key, "sha256": known[key]}) + "\n"
        try:
            with cache_path.open("a", encoding="utf-8") as stream:
                stream.write(line)  # one short write in append mode: lines of several processes do not mix
        except OSError as error:
            raise SourceError(
                f"Cannot remember a digest in {cache_path}: {error}. Set NANODAG_CACHE to a folder that can be written."
            ) from error
    return known[key]


def folder_sha256(folder: Path, *, without: Collection[str] = ()) -> str:
    """64 hex digits over names and contents of files below a folder, except compiled Python and `without`'s folders."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and path.suffix != ".pyc" and not set(without) & set(name.parts):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name.as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


@functools.cache
def _remembered(cache_path: Path) -> dict[str, str]:
    known: dict[str, str] = {}
    for line in cache_path.read_text(encoding="utf-8").splitlines() if cache_path.exists() else ():
        try:
            record = json.loads(line)
            known.setdefault(record["key"], record["sha256"])
        except (ValueError, KeyError):  # cut off by a crash; that file is hashed again
            continue
    return known
