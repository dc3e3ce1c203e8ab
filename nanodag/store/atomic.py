"""Files that are either whole or not there, and locks that go with their process."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from nanodag.errors import NanodagError, StoreBusy, StoreError
from nanodag.host.beside import table_beside

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
NOT_REGULAR = -2
_TEMPORARY = re.compile(r"\.(?P<host>[0-9a-f]{6})-(?P<pid>\d+)-[0-9a-f]{8}\.tmp")
_MENDS: dict[str, str] = table_beside(__file__, "mends.yaml")


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn errors of the file system into a StoreError. what: the thing being written, and where."""
    try:
        yield
    except NanodagError:
        raise
    except OSError as error:
        mend = _MENDS.get(errno.errorcode.get(error.errno or 0, ""), "Mend that, then resume")
        raise StoreError(f"{what} failed ({error}). {mend}; nothing that was there before was touched.") from error


def sizes_below(folder: Path) -> dict[str, int]:
    """Relative path -> bytes of every file below a folder, NOT_REGULAR for links and whatever else is no file; empty
    when there is no such folder. Links are not followed: they could lead out of the folder."""
    sizes: dict[str, int] = {}
    waiting = [(str(folder), "")]
    while waiting:
        path, prefix = waiting.pop()
        try:
            entries = list(os.scandir(path))
        except FileNotFoundError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append((entry.path, f"{prefix}{entry.name}/"))
            else:
                facts = entry.stat(follow_symlinks=False)
                sizes[prefix + entry.name] = facts.st_size if stat.S_ISREG(facts.st_mode) else NOT_REGULAR
    return sizes


def bytes_below(folder: Path) -> int:
    """Bytes of all regular files below a folder."""
    return sum(size for size in sizes_below(folder).values() if size != NOT_REGULAR)


def copy_hashed(source: Path, target: Path) -> str:
    """Copy a file's bytes and have them reach the disk; returns the sha256 of what was copied."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("xb") as writer:
        while block := reader.read(BLOCK_BYTES):
            digest.update(block)
            writer.write(block)
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """64 hex digits of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hashes_below(folder: Path) -> dict[str, dict[str, Any]]:
    """Relative path -> {"sha256", "bytes"} of every regular file below a folder, sorted.

    Raises ValueError at a link: it could lead out of the folder.
    """
    hashes: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"{path} is a link; an artifact holds only regular files. Copy what it points to.")
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            hashes[name] = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
    return hashes


def fsync_path(path: Path) -> None:
    """Have a file's bytes, or a folder's names, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folders(folder: Path) -> None:
    """Have the names in a folder and in all folders below it reach the disk."""
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        fsync_path(path)


def temporary_name() -> str:
    """A name that no reader looks at, and that tells whether its writer is still there."""
    return f".{_host()}-{os.getpid()}-{secrets.token_hex(4)}.tmp"


def is_leftover(name: str) -> bool:
    """True for a temporary name whose writer was a process of this host and is gone.

    A store may be shared: another host's processes cannot be seen from here, so theirs never are.
    """
    match = _TEMPORARY.fullmatch(name)
    return match is not None and match["host"] == _host() and not psutil.pid_exists(int(match["pid"]))


@functools.cache
def _host() -> str:
    """6 hex digits that name the world in which a process id means something: the machine, or the container on it."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        namespace = ""
    return hashlib.sha256(f"{os.uname().nodename}\0{namespace}".encode()).hexdigest()[:6]


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that at any instant either the old or the new content is there, also after a power cut."""
    # rename() is atomic only within one filesystem, so the temporary file sits next to its target.
    temporary = path.with_name(temporary_name())
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` of indented JSON; refuses NaN (ValueError)."""
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True, allow_nan=False, default=str) + "\n").encode())


@contextlib.contextmanager
def locked(
    path: Path, *, timeout_s: float, poll_s: float = 0.2, give_up: Callable[[], bool] = lambda: False
) -> Iterator[int]:
    """Hold an exclusive lock on a file, made when missing; yields its descriptor, which a child may inherit to hold on.

    Raises StoreBusy after timeout_s, or once give_up() says so.
    """
    with writing(f"Making the lock {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a")
    deadline, is_reported = time.monotonic() + timeout_s, False
    with opened as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if give_up():
                    raise StoreBusy(f"{path} is held by another process; it is not waited for any longer.") from None
                if time.monotonic() > deadline:
                    raise StoreBusy(f"{path} is held by another process; waited {timeout_s:.0f} s for it.") from None
                if not is_reported:
                    log.info("Waiting for another process that holds %s.", path)
                    is_reported = True
                time.sleep(poll_s)
        yield stream.fileno()
