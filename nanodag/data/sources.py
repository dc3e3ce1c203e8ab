"""Sources of rows; nanodag.data.opening opens them by URL.

A source has an identity, which goes into stage keys, and rows, numbered from 0. Rows come in blocks: a row group of a
parquet file, a few thousand lines of a jsonl file. One block at a time is in memory, and a shuffle can go to any of
them. A large data set on the hub comes in shards instead: files that are fetched one by one, and have blocks then.
Compressed text, and what is no parquet on the hub, have neither: they are read from the front only.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanodag.data.shards import RemoteFile

Row = dict[str, Any]


@dataclass(frozen=True)
class Block:
    """A run of consecutive rows that is read at once. num_bytes: about what it takes in memory."""

    num_rows: int
    num_bytes: int


class LazyRows(Sequence[Row]):
    """Rows made one by one when they are taken."""

    def __init__(self, num_rows: int, make: Callable[[int], Row]) -> None:
        self._num_rows = num_rows
        self._make = make

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Row:  # type: ignore[override] # no slices
        if not 0 <= index < self._num_rows:
            raise IndexError(index)
        return self._make(index)


class Rows:
    """Rows by number. A subclass has blocks and reads them, or overrides `stream` and has none."""

    def blocks(self) -> Sequence[Block] | None:
        """The blocks in order of their rows, or None where rows can only be read from the front."""
        return None

    def read(self, number: int) -> Sequence[Row]:
        """The rows of one block, decoded when they are taken out of the sequence."""
        raise NotImplementedError(f"{type(self).__name__} has no blocks")

    def stream(self) -> Iterator[Callable[[], Row]]:
        """For each row in order, a function that decodes it: rows that are skipped cost no decoding."""
        for number in range(len(self.blocks() or ())):
            rows = self.read(number)
            for index in range(len(rows)):
                yield partial(rows.__getitem__, index)

    def length(self) -> int | None:
        """The number of rows; None where only reading everything would tell."""
        blocks = self.blocks()
        return None if blocks is None else sum(block.num_rows for block in blocks)


class Source(Rows, ABC):
    """Rows of one URL. A subclass without blocks or `stream` overrides `rows`."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Identity of this data in a stage's key: equal exactly when the rows are the same. JSON values only."""

    def shards(self) -> "Sequence[RemoteFile] | None":
        """The files in order, where each is fetched when its turn comes; None elsewhere."""
        return None

    def apart(self) -> "tuple[Source, Source] | None":
        """All but the last shard, and the last: of several files, else of one's blocks. None where there are no two."""
        return self._apart_at([block.num_rows for block in self.blocks() or ()])

    def _apart_at(self, rows: Sequence[int]) -> "tuple[Source, Source] | None":
        """rows: of each part."""
        first = sum(rows[:-1])
        return (SlicedSource(self, 0, first), SlicedSource(self, first, None)) if len(rows) > 1 else None

    def rows(self, start: int = 0, shard: int = 0, num_shards: int = 1) -> Iterator[tuple[int, Row]]:
        """(number, row) from number `start` on, those with number % num_shards == shard."""
        blocks = self.blocks()
        if blocks is None:
            for index, take in enumerate(self.stream()):
                if index >= start and index % num_shards == shard:
                    yield index, take()
            return
        first = 0
        for number, block in enumerate(blocks):
            end, low = first + block.num_rows, max(first, start)
            indices = range(low + (shard - low) % num_shards, end, num_shards)
            if indices:
                rows = self.read(number)
                for index in indices:
                    yield index, rows[index - first]
            first = end


class SlicedSource(Source):
    """Rows start to stop of another source, numbered from 0 again."""

    def __init__(self, source: Source, start: int, stop: int | None) -> None:
        self._source = source
        self._start = start
        self._stop = stop

    def identity(self) -> dict[str, Any]:
        return {**self._source.identity(), "slice": [self._start, self._stop]}

    @cached_property
    def _pieces(self) -> list[tuple[int, int, Block]]:
        """Each block that has rows in the slice: its number, the first of them in it, and their block."""
        pieces = []
        first = 0
        for number, block in enumerate(self._source.blocks() or ()):
            low = max(self._start - first, 0)
            high = block.num_rows if self._stop is None else min(self._stop - first, block.num_rows)
            if low < high:
                pieces.append((number, low, Block(high - low, block.num_bytes)))
            first += block.num_rows
        return pieces

    def blocks(self) -> Sequence[Block] | None:
        return None if self._source.blocks() is None else [block for _, _, block in self._pieces]

    def read(self, number: int) -> Sequence[Row]:
        whole, low, block = self._pieces[number]
        rows = self._source.read(whole)
        return LazyRows(block.num_rows, lambda index: rows[low + index])

    def length(self) -> int | None:
        whole = self._source.length()
        stop = whole if self._stop is None or whole is None else min(self._stop, whole)
        return None if stop is None else max(0, stop - self._start)

    def rows(self, start: int = 0, shard: int = 0, num_shards: int = 1) -> Iterator[tuple[int, Row]]:
        if self.blocks() is not None:
            yield from super().rows(start, shard, num_shards)
            return
        for index, row in self._source.rows(self._start + start, (shard + self._start) % num_shards, num_shards):
            if self._stop is not None and index >= self._stop:
                return
            yield index - self._start, row
