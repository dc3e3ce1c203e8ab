"""Rows and text of sources: of generators by their parameters, of local files by their size and first MiB, of
a mirror's files by their footers, of others as the pipeline's `plan.data` says.
"""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from nanodag.config.pipeline import DataSize
from nanodag.data.config import SourceConfig
from nanodag.data.contamination import texts_in
from nanodag.data.core_tasks import TASKS
from nanodag.data.hub import mirrored_files
from nanodag.data.shuffle import WINDOW_BYTES
from nanodag.data.urls import WEB, SourceURL, hub_path, parse_url
from nanodag.errors import MissingTool, SourceError
from nanodag.host.beside import table_beside
from nanodag.plan import host_memory

SIZES: dict[str, Any] = table_beside(__file__)
CORE_CONTEXT = 1000
"""Tokens of a question of CORE with its worked examples, as the average token has them, for attention's share."""
ENDLESS = 1 << 60
MIRRORED_FOOTERS = 16
HEAD_BYTES = 1 << 20
BLOCK_FORMATS = (".parquet", ".jsonl", ".ndjson", ".txt")


@dataclass(frozen=True)
class SourceSize:
    """rows: all of them, None for a stream whose end nobody reaches. row_bytes: text of a row, on average. in_memory:
    bytes of files that are read as a whole; in_blocks: of those that are read and shuffled block by block. Both are of
    files of this machine. prompt_bytes, longest_prompt_bytes: on average, at most; 0 where nobody says."""

    rows: int | None
    row_bytes: float
    in_memory: int = 0
    in_blocks: int = 0
    prompt_bytes: float = 0.0
    longest_prompt_bytes: int = 0


class Sizes:
    """Sizes of sources, as far as they are known beforehand. stated: in the pipeline file. mirror: a folder that stands
    for the hub; the footers of its files are read."""

    def __init__(self, stated: Sequence[DataSize] = (), mirror: Path | None = None) -> None:
        self._stated = {_name_of(parse_url(size.url)): size for size in stated}
        self._mirror = mirror

    def of(self, url: str) -> SourceSize | None:
        """Size of one source; None where nothing is known beforehand."""
        parsed = parse_url(url)
        whole = self._stated_or_counted(parsed)
        if whole is None or (parsed.start == 0 and parsed.stop is None):
            return whole
        end = parsed.stop if whole.rows is None else min(parsed.stop or whole.rows, whole.rows)
        return whole if end is None else replace(whole, rows=max(0, end - parsed.start))

    def _stated_or_counted(self, url: SourceURL) -> SourceSize | None:
        if url.kind != "hub":
            size = _whole(url)
        else:
            size = _mirrored(tuple(mirrored_files(url, self._mirror))) if self._mirror is not None else None
        if (stated := self._stated.get(_name_of(url))) is None:
            return size
        if size is None or size.rows is None:
            size = replace(size or SourceSize(None, 0.0), rows=stated.rows or None, row_bytes=stated.row_bytes)
        return replace(size, prompt_bytes=stated.prompt_bytes, longest_prompt_bytes=stated.longest_prompt_bytes)

    def text_bytes(self, url: str) -> int:
        """Bytes of text of all rows of a source, of a file that is not compressed at most. A stream, or a source that
        is not known, counts as endless."""
        size = self.of(url)
        if size is None:
            return ENDLESS
        return int(size.rows * size.row_bytes) if size.rows is not None else size.in_blocks + size.in_memory or ENDLESS

    def tokens_of_pass(self, sources: Sequence[SourceConfig], vocabulary: int) -> int | None:
        """Tokens of one pass over conversations mixed by epochs, what is held out left out; None where a source's size
        is not known."""
        if any(source.weight is not None for source in sources):
            return None
        shares = [(1 - held_out_share(source)) * (source.epochs or 1.0) for source in sources]
        return self._tokens(sources, shares, vocabulary, is_chat=True)

    def held_out_tokens(self, sources: Sequence[SourceConfig], vocabulary: int, *, is_chat: bool) -> int | None:
        """Tokens that a mixture holds out: of conversations, where there are such beside text. None where that is not
        known; 0 where nothing is held out."""
        held_out = [source for source in sources if source.held_out]
        held_out = [source for source in held_out if source.adapter != "text"] or held_out
        shares = list(map(held_out_share, held_out))
        return self._tokens(held_out, shares, vocabulary, is_chat=is_chat) if all(shares) else None

    def _tokens(
        self, sources: Sequence[SourceConfig], shares: Sequence[float], vocabulary: int, *, is_chat: bool
    ) -> int | None:
        """Tokens of so large shares of the sources' rows; None where a size is not known."""
        tokens = []
        for source, share in zip(sources, shares, strict=True):
            size = self.of(source.url)
            if size is None or size.rows is None:
                return None
            template = 1 if source.adapter == "text" or not is_chat else SIZES["chat_tokens"]
            tokens.append(size.rows * (size.row_bytes / bytes_per_token(vocabulary) + template) * share)
        return int(sum(tokens))

    def in_memory(self, sources: Sequence[SourceConfig]) -> int:
        """Bytes of files that a process holds as a whole."""
        files = {source.url.partition("?")[0]: self.of(source.url) for source in sources}
        return sum(size.in_memory for size in files.values() if size is not None)

    def in_windows(self, sources: Sequence[SourceConfig]) -> int:
        """Bytes that a process shuffles at once: of each source with blocks a window, or all of a small one."""
        on_hub = [self.text_bytes(source.url) for source in sources if source.url.startswith("hub:")]
        others = [self.of(source.url) for source in sources if not source.url.startswith("hub:")]
        in_blocks = [size.in_blocks for size in others if size is not None]
        return sum(min(WINDOW_BYTES, num_bytes) for num_bytes in on_hub + in_blocks)

    def held_to_read(self, sources: Sequence[SourceConfig]) -> int:
        """Bytes of host memory that a process takes to read a mixture: files that it parses as a whole, windows that it
        shuffles, and the library that reads parquet."""
        is_parquet = any(url.startswith("hub:") or ".parquet" in url for url in (source.url for source in sources))
        windows = int(host_memory.WINDOWED * self.in_windows(sources))
        return int(host_memory.PARSED * self.in_memory(sources)) + windows + host_memory.BYTES["parquet"] * is_parquet

    def mean_prompt(self, url: str, vocabulary: int) -> float:
        """Tokens of a source's prompt on average: a third of a row where nobody says."""
        size = self.of(url)
        num_bytes = SIZES["prompt_bytes"] if size is None else size.prompt_bytes or size.row_bytes / 3
        return num_bytes / (SIZES["denser"] * bytes_per_token(vocabulary)) + SIZES["template_tokens"]

    def longest_prompt(self, url: str, vocabulary: int) -> int | None:
        """Tokens of a source's longest prompt; None of one that is not known."""
        if url.startswith(("python:nanodag.", "reasoning_gym:")):
            return SIZES["generated_longest"]
        size = self.of(url)
        if size is None or not size.longest_prompt_bytes:
            return None
        tokens = int(size.longest_prompt_bytes / (SIZES["denser"] * bytes_per_token(vocabulary)))
        return tokens + SIZES["template_tokens"] + SIZES["extra_instruction"]


def _name_of(url: SourceURL) -> tuple[str, ...]:
    """The source that a URL names, its parameters and its slice left out."""
    if url.kind != "hub":
        return url.kind, url.path
    path = hub_path(url)
    return path.name, path.config, path.split


def _whole(url: SourceURL) -> SourceSize | None:
    """Size of a source that is not on the hub, its slice left out."""
    if url.kind in ("verifiers", "input", *WEB):
        return None
    if url.kind not in ("python", "reasoning_gym"):
        return _files(url)
    rows = url.parameters.get("size", 10_000)
    if (url.kind == "python" and not url.path.startswith("nanodag.")) or not isinstance(rows, int):
        return None
    return SourceSize(rows, SIZES["problem_bytes"])


@functools.cache
def _mirrored(files: tuple[Path, ...]) -> SourceSize | None:
    """Size of a mirror's files, by the footers of the first ones; None where there are none, or one cannot be read:
    the check of the data says so."""
    from pyarrow import parquet

    try:
        footers = [parquet.read_metadata(path) for path in files[:MIRRORED_FOOTERS]]
    except (OSError, ValueError):
        return None
    groups = [footer.row_group(number) for footer in footers for number in range(footer.num_row_groups)]
    rows = sum(group.num_rows for group in groups)
    if not rows:
        return None
    row_bytes = sum(group.total_byte_size for group in groups) / rows
    return SourceSize(rows * len(files) // len(footers), row_bytes)


def _files(url: SourceURL) -> SourceSize | None:
    """Size of files on this machine: a JSON file is read as a whole, compressed text from the front."""
    from nanodag.data import files

    try:
        paths = list((files.open_package_file(url) if url.kind == "package" else files.open_file(url)).paths)
        num_bytes = sum(path.stat().st_size for path in paths)
        rows, row_bytes = _rows_of(paths[0], num_bytes)
    except (OSError, EOFError, ValueError, zlib.error, SourceError, MissingTool):
        return None  # what reads it says why
    suffix = paths[0].suffix
    if suffix == ".parquet" and (of_footers := _mirrored(tuple(paths))) and of_footers.rows:
        return replace(of_footers, in_blocks=int(of_footers.rows * of_footers.row_bytes))
    whole, blocks = num_bytes if suffix == ".json" else 0, num_bytes if suffix in BLOCK_FORMATS else 0
    return SourceSize(rows, row_bytes, in_memory=whole, in_blocks=blocks)


@functools.cache
def _rows_of(path: Path, num_bytes: int) -> tuple[int | None, float]:
    """Rows of files of so many bytes, and text of one, as the first of them begins: JSON lines by what stands in them,
    other text in one row where it is compressed. None for rows of all else."""
    import orjson

    from nanodag.data.formats import open_binary

    is_packed = path.suffix in (".gz", ".zst")
    is_lines = (Path(path.stem) if is_packed else path).suffix in (".jsonl", ".ndjson")
    is_empty = not path.stat().st_size  # what reads it says so
    if is_empty or not (is_packed or is_lines):
        return None, SIZES["stream_row_bytes"]
    with open_binary(path) as stream:
        head, is_all = stream.read(HEAD_BYTES), not stream.read(1)
    unpacked = len(head) / path.stat().st_size if is_all else SIZES["unpacked"] if is_packed else 1.0
    if not is_lines:
        return 1, unpacked * num_bytes
    whole = head if is_all else head[: head.rfind(b"\n") + 1]
    rows = [orjson.loads(line) for line in whole.splitlines() if line.strip()]
    texts = [sum(len(text.encode()) for text in texts_in(row)) for row in rows]
    if not texts:
        return None, SIZES["stream_row_bytes"]
    return round(unpacked * num_bytes * len(texts) / len(whole)), fmean(texts)


def bytes_per_token(vocabulary: int) -> float:
    """Bytes of English text in a token of a vocabulary: measured 2.8 at 2,048; 3.8, 4.6 and 4.8 at 8,192, 32,768 and
    150,000, between them along the logarithm."""
    points = ((512, 1.9), (2048, 2.8), (8192, 3.8), (32_768, 4.6), (151_936, 4.8))
    vocabulary = min(max(vocabulary, points[0][0]), points[-1][0])
    (low, below), (high, above) = next(pair for pair in pairwise(points) if vocabulary <= pair[1][0])
    return below + (above - below) * (vocabulary / low - 1) / (high / low - 1)


def held_out_share(source: SourceConfig) -> float:
    """Share of a source's rows that a hash keeps from training; 0 where none is, or a whole file."""
    return float(source.held_out) if isinstance(source.held_out, int | float) else 0.0


def core_items(limit: int) -> int:
    """Items of all of CORE's tasks, at most `limit` of each; 0 for all."""
    return sum(min(task.num_items, limit or task.num_items) for task in TASKS)


def core_tokens(limit: int, vocabulary: int) -> float:
    """Tokens that go through the model for one CORE on so many items a task."""
    text = sum(min(task.num_items, limit or task.num_items) * task.item_bytes for task in TASKS)
    return text / bytes_per_token(vocabulary)
