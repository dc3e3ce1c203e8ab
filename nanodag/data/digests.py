"""sha256 of files, remembered by path, size and modification time so that unchanged data is hashed once."""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from nanodag.errors import SourceError
from nanodag.host.folders import cache_folder

_known: dict[Path, dict[str, str]] = {}


def file_sha256(path: Path, cache_path: Path | None = None) -> str:
    """64 hex digits of a file's content.

    cache_path: a file of JSON lines that remembers digests between processes; default `digests.jsonl` under
    NANODAG_CACHE, or under the user's cache folder. Processes may append to it at the same time.
    """
    cache_path = cache_path or default_cache_path()
    path = path.resolve()
    status = path.stat()
    key = f"{path}|{status.st_size}|{status.st_mtime_ns}"
    known = _read_cache(cache_path)
    if key not in known:
        with path.open("rb") as stream:
            known[key] = hashlib.file_digest(stream, "sha256").hexdigest()
        _append(cache_path, key, known[key])
    return known[key]


def folder_sha256(folder: Path, *, without: Collection[str] = ()) -> str:
    """64 hex digits over names and contents of all files below a folder, compiled Python left out. without: names of
    folders in it whose files do not count."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and path.suffix != ".pyc" and not set(without) & set(name.parts):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name.as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def default_cache_path() -> Path:
    """Default file of remembered digests."""
    return cache_folder() / "digests.jsonl"


def _read_cache(cache_path: Path) -> dict[str, str]:
    if cache_path not in _known:
        _known[cache_path] = {}
        if cache_path.exists():
            for line in cache_path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                    _known[cache_path][record["key"]] = record["sha256"]
                except (ValueError, KeyError):  # cut off by a crash; that file is hashed again
                    continue
    return _known[cache_path]


def _append(cache_path: Path, key: str, sha256: str) -> None:
    line = json.dumps({"key": key, "sha256": sha256}) + "\n"
    try:
        cache_path.parent.mkdir(parents=True, exist_ok=True)
        with cache_path.open("a", encoding="utf-8") as stream:
            stream.write(line)  # one short write in append mode: lines of several processes do not mix
    except OSError as error:
        raise SourceError(
            f"Cannot remember a digest in {cache_path}: {error}. Set NANODAG_CACHE to a folder that can be written."
        ) from error
