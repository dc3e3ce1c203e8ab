"""Answers of an evaluation, kept as it goes: a killed one goes on behind it. No torch here.

A file holds a JSON object a line, each behind a check sum. Lines are only added. The end of a line that a kill or a
power cut left half written is not there, and is cut off at the next start.
"""

import hashlib
import json
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SYNC_EVERY_S = 1.0


def content_key(*parts: Any) -> str:
    """32 hex digits of what was asked: values that JSON can write."""
    return hashlib.blake2b(json.dumps(parts, separators=(",", ":")).encode(), digest_size=16).hexdigest()


class KeptLines:
    """Values by key, in a file that grows.

    A line is with the operating system when `add` returns, so a killed process loses none. It reaches the disk within a
    second of more being added, and at the end of the `with` block: what a power cut may cost.
    """

    def __init__(self, path: Path) -> None:
        self._values: dict[str, Any] = {}
        num_bytes = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if (values := _read(line)) is None:
                    break
                self._values |= values
                num_bytes += len(line)
        self._file = path.open("ab")
        self._file.truncate(num_bytes)
        self._synced = time.monotonic()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: str) -> Any:
        """The value kept under a key; None where there is none."""
        return self._values.get(key)

    def add(self, values: Mapping[str, Any]) -> None:
        """Keep values, all of them or, where the process is killed meanwhile, none."""
        content = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
        self._file.write(b"%08x %s\n" % (zlib.crc32(content), content))
        self._file.flush()
        self._values |= values
        if time.monotonic() - self._synced >= SYNC_EVERY_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def __enter__(self) -> "KeptLines":
        return self

    def __exit__(self, *error: object) -> None:
        """Have all lines reach the disk, and close the file."""
        os.fsync(self._file.fileno())
        self._file.close()


def _read(line: bytes) -> dict[str, Any] | None:
    """The values of a line; None where it is not whole."""
    check, _, content = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or check != b"%08x" % zlib.crc32(content):
        return None
    values: dict[str, Any] = json.loads(content)
    return values
