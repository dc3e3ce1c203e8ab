"""Hugging Face data sets as sources: files fetched from the hub, or read from a mirror folder.

A mirror is laid out as `<hub name>/<config>/<split>.parquet` (or several files `<split>-*.parquet`); a URL without a
config means `default` there. With a mirror the hub is never asked: what is not in the mirror is an error.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from nanodag.data.files import FileSource
from nanodag.data.shards import FetchedSource, RemoteFile, ShardedSource
from nanodag.data.sources import Block, Row, Source
from nanodag.data.urls import HubPath, SourceURL, hub_path
from nanodag.errors import SourceError

_FEW_FILES, _FEW_BYTES = 64, 4 << 30  # a data set within both is small


class HubSource(Source):
    """Rows of the hub's files at one commit.

    Of parquet files, a small data set is fetched whole and has blocks, as from a mirror; a larger one is read shard by
    shard. `rows` streams from the front, so that a few rows cost no file; so does all where files are not parquet.
    """

    def __init__(self, url: SourceURL) -> None:
        self._url = url
        self._path = hub_path(url)

    def identity(self) -> dict[str, Any]:
        return {**_name_of(self._path), "commit": self._commit}

    @cached_property
    def _commit(self) -> str:
        """The commit that is read: of the URL, else the newest one, asked of the hub once."""
        if re.fullmatch("[0-9a-f]{40}", self._path.revision):
            return self._path.revision
        import httpx2  # what huggingface_hub speaks HTTP with: a missing network is its error, not an OSError
        import huggingface_hub

        try:
            info = huggingface_hub.HfApi().dataset_info(self._path.name, revision=self._path.revision or None)
        except (OSError, ValueError, httpx2.HTTPError) as error:
            raise SourceError(
                f"Source {self._url.text!r}: the hub does not say which commit {self._path.name} is at: {error}. "
                f"Check the name and the network; or name a commit, hub:{self._path.name}@<40 hex digits>; or set "
                "a mirror."
            ) from error
        return str(info.sha)

    def shards(self) -> Sequence[RemoteFile] | None:
        return None if self._is_small else self._files

    def blocks(self) -> Sequence[Block] | None:
        return self._fetched.blocks() if self._is_small else None

    def read(self, number: int) -> Sequence[Row]:
        return self._fetched.read(number)

    def apart(self) -> tuple[Source, Source] | None:
        if self._files is None:
            return None
        return self._fetched.apart() if self._is_small else ShardedSource(self._files).apart()

    def length(self) -> int | None:
        split = (self._builder.info.splits or {}).get(self._path.split)
        if split is not None:  # what the data set says of itself costs no file
            return split.num_examples
        return self._fetched.length() if self._is_small else None

    def rows(self, start: int = 0, shard: int = 0, num_shards: int = 1) -> Iterator[tuple[int, Row]]:
        with self._reading() as datasets:
            stream = datasets.load_dataset(**self._named, split=self._path.split, streaming=True)
            stream = stream.decode(False) if stream.features else stream  # images as the files that they are
        if start:
            stream = stream.skip(start)
        for index, row in enumerate(stream, start):
            if index % num_shards == shard:
                yield index, row

    @property
    def _named(self) -> dict[str, Any]:
        return {"path": self._path.name, "name": self._path.config or None, "revision": self._commit}

    @cached_property
    def _builder(self) -> Any:
        with self._reading() as datasets:
            return datasets.load_dataset_builder(**self._named)

    @cached_property
    def _files(self) -> list[RemoteFile] | None:
        """The split's files in the hub's order; None where they are not parquet."""
        from fsspec.core import url_to_fs

        by_split = self._builder.config.data_files or {}
        with self._reading():
            if self._path.split not in by_split:
                raise ValueError(f"there is no split {self._path.split!r}, but {', '.join(by_split) or 'none'}")
            urls = [str(url) for url in by_split[self._path.split]]
            if not all(url.endswith(".parquet") for url in urls):
                return None
            paths = [url_to_fs(url) for url in urls]
            folders = {path.rpartition("/")[0]: fs for fs, path in paths}  # listing them tells the files' sizes
            listed = [entry for folder, fs in folders.items() for entry in fs.ls(folder, detail=True)]
            sizes = {entry["name"]: entry["size"] for entry in listed}
            return [RemoteFile(url, int(sizes.get(path) or 0)) for url, (_, path) in zip(urls, paths, strict=True)]

    @cached_property
    def _is_small(self) -> bool:
        files = self._files
        return files is not None and len(files) <= _FEW_FILES and sum(f.num_bytes for f in files) <= _FEW_BYTES

    @cached_property
    def _fetched(self) -> FetchedSource:
        return FetchedSource(self._files or [])

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        """The datasets library; its errors say which source they are about."""
        import datasets
        import httpx2

        try:
            yield datasets
        except (OSError, ValueError, datasets.exceptions.DatasetsError, httpx2.HTTPError) as error:
            raise SourceError(
                f"Source {self._url.text!r} cannot be read from the hub: {error}. Check name, config and split."
            ) from error


def _name_of(path: HubPath) -> dict[str, str]:
    return {"kind": "hub", "name": path.name, "config": path.config, "split": path.split}


def mirrored_files(url: SourceURL, mirror: Path) -> list[Path]:
    """The files of a `hub:` URL in a mirror; none where it is not there."""
    path = hub_path(url)
    folder = mirror / path.name / (path.config or "default")
    whole = folder / f"{path.split}.parquet"
    return [whole] if whole.is_file() else sorted(folder.glob(f"{path.split}-*.parquet"))


def open_hub(url: SourceURL, mirror: Path | None) -> Source:
    """The source of a `hub:` URL, from the mirror when there is one."""
    if mirror is None:
        return HubSource(url)
    path = hub_path(url)
    path = HubPath(path.name, path.revision, path.config or "default", path.split)
    if not (files := mirrored_files(url, mirror)):
        folder = mirror / path.name / path.config
        raise SourceError(
            f"Source {url.text!r} is not in the mirror: there is no {folder / path.split}.parquet. "
            f"{_what_there_is(mirror, path)} Add the file, change the URL, or unset the mirror to read from the hub."
        )
    return FileSource(files, name=_name_of(path))  # by the hub's name; its identity is the content


def _what_there_is(mirror: Path, path: HubPath) -> str:
    if not mirror.is_dir():
        return f"The mirror {mirror} is not a folder."
    there = sorted(p.relative_to(mirror / path.name).as_posix() for p in (mirror / path.name).glob("*/*.parquet"))
    if there:
        return f"Of {path.name} it has {', '.join(there[:20])}."
    names = sorted({p.parent.parent.relative_to(mirror).as_posix() for p in mirror.glob("*/*/*/*.parquet")})
    return f"It has nothing of {path.name}; it has {', '.join(names[:20]) or 'no data set at all'}."
