import hashlib
import os

import pytest

from nanodag.data import digests
from nanodag.data.digests import file_sha256
from nanodag.errors import SourceError
from nanodag.host.folders import cache_folder


def test_a_digest_is_remembered_by_path_size_and_time(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"one")
    assert file_sha256(path) == hashlib.sha256(b"one").hexdigest()
    times = os.stat(path)
    path.write_bytes(b"two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    digests._remembered.cache_clear()  # another process
    assert file_sha256(path) == hashlib.sha256(b"one").hexdigest()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert file_sha256(path) == hashlib.sha256(b"two").hexdigest()


def test_half_a_line_in_the_cache_does_no_harm(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"one")
    (cache_folder() / "digests.jsonl").write_text('{"key": "x", "sha')
    assert file_sha256(path) == hashlib.sha256(b"one").hexdigest()


def test_a_cache_that_cannot_be_written_says_how_to_move_it(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(b"one")
    monkeypatch.setenv("NANODAG_CACHE", str(path))
    with pytest.raises(SourceError, match="Set NANODAG_CACHE"):
        file_sha256(path)
