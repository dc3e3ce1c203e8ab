"""Archives by URL as sources: a zip of .jsonl files, fetched once and unpacked in the cache folder.

The sha256 of the first content is remembered, and other content refused. In a mirror it lies at <host>/<path>.zip.
"""

import os
import stat
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePath

from nanodag.data.digests import file_sha256, remembered_sha256
from nanodag.data.shards import RemoteFile
from nanodag.data.urls import SourceURL
from nanodag.errors import SourceError
from nanodag.errors.words import size
from nanodag.host.folders import cache_folder

MOST_BYTES, MOST_FILES = 8 << 30, 10_000  # of an archive, unpacked


def unpacked(url: SourceURL, mirror: Path | None) -> Path:
    """The folder of an archive's files, fetched and unpacked unless it is there; SourceError where that fails."""
    place = url.path.removeprefix("//")
    if (folder := cache_folder() / "archives" / place).is_dir():
        return folder
    path = RemoteFile(f"{url.kind}:{url.path}", 0).fetch() if mirror is None else mirror / place
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            _check(archive.infolist())
            archive.extractall(files := Path(temporary) / "files")
            if (digest := file_sha256(path)) != (first := remembered_sha256(path, url.path)):
                why = f"its sha256 is {digest}, and was {first} when it was first fetched; if the new one is meant"
                raise zipfile.BadZipFile(f"{why}, remove {url.path} from {cache_folder()}/digests.jsonl")
            os.rename(files, folder)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        if not folder.is_dir():  # else another process was faster
            if mirror is None:
                path.unlink(missing_ok=True)  # or the next start would find it
            raise SourceError(f"Source {url.text!r} cannot be taken, as {path}: {error}.") from error
    return folder


def _check(entries: list[zipfile.ZipInfo]) -> None:
    """Raise BadZipFile for what would do harm. No more is ever read of an entry than the size that it states."""
    if len(entries) > MOST_FILES or sum(entry.file_size for entry in entries) > MOST_BYTES:
        raise zipfile.BadZipFile(f"it holds more than {MOST_FILES:,} files, or {size(MOST_BYTES)} unpacked")
    for entry in entries:
        name, is_packed_otherwise = PurePath(entry.filename), entry.compress_type > zipfile.ZIP_DEFLATED
        is_file = stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG, stat.S_IFDIR)
        if is_packed_otherwise or not is_file or name.is_absolute() or ".." in name.parts:
            raise zipfile.BadZipFile(f"its entry {entry.filename!r} is no plain file inside")
