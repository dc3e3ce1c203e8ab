"""Sources of rows; nanodag.data.opening opens them by URL.

A source has an identity, which goes into stage keys, and rows, numbered from 0. Rows come in blocks: a row group of a
parquet file, a few thousand lines of a jsonl file. One block at a time is in memory, and a shuffle can go to any of
them. A large data set on the hub comes in shards instead: files that are fetched one by one, and have blocks then.
Compressed text, and what is no parquet on the hub, have neither: they are read from the front only.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Row = dict[str, Any]


@dataclass(frozen=True)
class Block:
    """A run of consecutive rows that is read at once. num_bytes: about what it takes in memory."""

    num_rows: int
    num_bytes: int


class Shard(Protocol):
    """A file of a source that is fetched when its turn comes."""

    def fetch_ahead(self) -> None:
        """Fetch it beside other work; opening it waits for that."""

    def open(self) -> "Source":
        """Its rows, in blocks."""


class Source(ABC):
    """Rows by number. A subclass has blocks and reads them, or overrides `rows` and has none."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Identity of this data in a stage's key: equal exactly when the rows are the same. JSON values only."""

    def blocks(self) -> Sequence[Block] | None:
        """The blocks in order of their rows, or None where rows can only be read from the front."""
        return None

    def shards(self) -> Sequence[Shard] | None:
        """The files in order, where each is fetched when its turn comes; None elsewhere."""
        return None

    def apart(self) -> "tuple[Source, Source] | None":
        """All but the last shard, and the last: the last of several files, else the last block of one. None where
        there are no two."""
        return self._apart_at([block.num_rows for block in self.blocks() or ()])

    def _apart_at(self, rows: Sequence[int]) -> "tuple[Source, Source] | None":
        """rows: of each part."""
        first = sum(rows[:-1])
        return (SlicedSource(self, 0, first), SlicedSource(self, first, None)) if len(rows) > 1 else None

    def read(self, number: int) -> Sequence[Row]:
        """The rows of one block, decoded when they are taken out of the sequence."""
        raise NotImplementedError(f"{type(self).__name__} has no blocks")

    def length(self) -> int | None:
        """The number of rows; None where only reading everything would tell."""
        blocks = self.blocks()
        return None if blocks is None else sum(block.num_rows for block in blocks)

    def rows(self, start: int = 0, shard: int = 0, num_shards: int = 1) -> Iterator[tuple[int, Row]]:
        """(number, row) from number `start` on, those with number % num_shards == shard."""
        first = 0
        for number, block in enumerate(self.blocks() or ()):
            end = first + block.num_rows
            indices = range(_first_of_shard(max(first, start), shard, num_shards), end, num_shards)
            if indices:
                rows = self.read(number)
                for index in indices:
                    yield index, rows[index - first]
            first = end


def _first_of_shard(start: int, shard: int, num_shards: int) -> int:
    return start + (shard - start) % num_shards


class SlicedSource(Source):
    """Rows start to stop of another source, numbered from 0 again."""

    def __init__(self, source: Source, start: int, stop: int | None) -> None:
        self._source = source
        self._start = start
        self._stop = stop
        self._pieces: list[tuple[int, int, int, int]] | None = None  # block, first and end row in it, bytes

    def identity(self) -> dict[str, Any]:
        return {**self._source.identity(), "slice": [self._start, self._stop]}

    def blocks(self) -> Sequence[Block] | None:
        blocks = self._source.blocks()
        if blocks is None:
            return None
        if self._pieces is None:
            self._pieces = []
            first = 0
            for number, block in enumerate(blocks):
                low = max(self._start - first, 0)
                high = block.num_rows if self._stop is None else min(self._stop - first, block.num_rows)
                if low < high:
                    self._pieces.append((number, low, high, block.num_bytes))
                first += block.num_rows
        return [Block(high - low, num_bytes) for _, low, high, num_bytes in self._pieces]

    def read(self, number: int) -> Sequence[Row]:
        if self._pieces is None:
            self.blocks()
        assert self._pieces is not None
        block, low, high, _ = self._pieces[number]
        return _Window(self._source.read(block), low, high)

    def length(self) -> int | None:
        whole = self._source.length()
        if whole is None:
            return None
        return max(0, (whole if self._stop is None else min(self._stop, whole)) - self._start)

    def rows(self, start: int = 0, shard: int = 0, num_shards: int = 1) -> Iterator[tuple[int, Row]]:
        if self.blocks() is not None:
            yield from super().rows(start, shard, num_shards)
            return
        for index, row in self._source.rows(self._start + start, (shard + self._start) % num_shards, num_shards):
            if self._stop is not None and index >= self._stop:
                return
            yield index - self._start, row


class _Window(Sequence[Row]):
    """Part of a sequence without copying or decoding it."""

    def __init__(self, rows: Sequence[Row], low: int, high: int) -> None:
        self._rows, self._low, self._high = rows, low, high

    def __len__(self) -> int:
        return self._high - self._low

    def __getitem__(self, index: int) -> Row:  # type: ignore[override] # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._rows[self._low + index]
