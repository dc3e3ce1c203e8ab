"""How many rows, and how much text, a source has: of generators by their parameters, of local files by their size, of
the sets on the hub that presets name by a table, or by the footers of a mirror's files. No row is read.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from nanodag.data.config import SourceConfig
from nanodag.data.hub import mirrored_files
from nanodag.data.shuffle import WINDOW_BYTES
from nanodag.data.urls import SourceURL, hub_path, parse_url
from nanodag.errors import MissingTool, SourceError
from nanodag.plan import processes
from nanodag.plan.models import Habit

CHAT_TOKENS = 7
"""Tokens that the chat template adds to a question and its answer."""
PROBLEM_BYTES = 60
"""Text of a generated problem that is in no table."""
STREAM_ROW_BYTES = 2500
ENDLESS = 1 << 60
MIRRORED_FOOTERS = 16


@dataclass(frozen=True)
class SourceSize:
    """rows: all of them, None for a stream whose end nobody reaches. row_bytes: text of a row, on average. packed:
    bytes as they lie on the hub, of all rows; 0 for what is on this machine. in_memory: bytes of files that are read as
    a whole; in_blocks: of those that are read and shuffled block by block. Both are of files of this machine."""

    rows: int | None
    row_bytes: float
    packed: int = 0
    in_memory: int = 0
    in_blocks: int = 0


# name, config and split on the hub: rows, bytes of text a row, bytes of parquet. From the pages of the data sets.
HUB: dict[tuple[str, str, str], tuple[int | None, float, int]] = {
    ("karpathy/climbmix-400b-shuffle", "", "train"): (None, STREAM_ROW_BYTES, 600_000_000_000),
    ("wikimedia/wikipedia", "20231101.en", "train"): (6_407_814, 3140, 11_600_000_000),
    ("crumb/openstax-text", "", "train"): (60, 900_000, 30_000_000),
    ("HuggingFaceTB/smol-smoltalk", "", "train"): (460_341, 1900, 480_000_000),
    ("cais/mmlu", "auxiliary_train", "train"): (99_842, 1600, 47_500_000),
    ("cais/mmlu", "all", "test"): (14_042, 480, 3_500_000),
    ("cais/mmlu", "all", "dev"): (285, 440, 80_000),
    ("openai/gsm8k", "main", "train"): (7_473, 530, 2_300_000),
    ("openai/gsm8k", "main", "test"): (1_319, 540, 420_000),
    ("allenai/ai2_arc", "ARC-Easy", "train"): (2_251, 270, 330_000),
    ("allenai/ai2_arc", "ARC-Easy", "validation"): (570, 270, 90_000),
    ("allenai/ai2_arc", "ARC-Challenge", "train"): (1_119, 300, 190_000),
    ("allenai/ai2_arc", "ARC-Challenge", "validation"): (299, 300, 56_000),
    ("baber/piqa", "default", "validation"): (1_838, 300, 300_000),
    ("allenai/winogrande", "winogrande_xl", "validation"): (1_267, 150, 85_000),
}
# Of what this package and reasoning-gym generate: text of a row, its tokens in chat form, those of its prompt. Measured
# with pocket's tokenizer.
GENERATED = {
    "reverse": (31, 22.5, 14.2),
    "pick": (23, 18.1, 16.1),
    "add": (11, 16.0, 14.0),
    "sort": (34, 27.0, 17.0),
    "chain_sum": (68, 33.7, 31.5),
}
# Rows of known files: name of the file -> rows and text of a row.
FILES = {"hotpotqa.json": (66_635, 519)}
BLOCK_FORMATS = (".parquet", ".jsonl", ".ndjson", ".txt")


def size_of(url: str, mirror: Path | None = None) -> SourceSize | None:
    """Of one source; None where nothing is known beforehand. mirror: a folder that stands for the hub; the footers of
    its files are read."""
    parsed = parse_url(url)
    found = _whole(parsed, mirror)
    if found is None or (parsed.start == 0 and parsed.stop is None):
        return found
    end = parsed.stop if found.rows is None else min(parsed.stop or found.rows, found.rows)
    if end is None:
        return found
    rows = max(0, end - parsed.start)
    packed = int(found.packed * min(1.0, rows / found.rows)) if found.rows else 0
    return replace(found, rows=rows, packed=packed)


def _whole(url: SourceURL, mirror: Path | None) -> SourceSize | None:
    if url.kind == "hub" and mirror is not None and (found := _mirrored(tuple(mirrored_files(url, mirror)))):
        return found
    if url.kind == "hub":
        path = hub_path(url)
        row = HUB.get((path.name, path.config, path.split))
        return SourceSize(*row) if row is not None else None
    if url.kind in ("python", "reasoning_gym"):
        name = url.path.rpartition(":")[2]
        size = url.parameters.get("size", 10_000)
        if url.kind == "python" and not url.path.startswith("nanodag."):
            return None
        return (
            SourceSize(size, GENERATED[name][0] if name in GENERATED else PROBLEM_BYTES)
            if isinstance(size, int)
            else None
        )
    return None if url.kind in ("verifiers", "input") else _files(url)


@functools.cache
def _mirrored(files: tuple[Path, ...]) -> SourceSize | None:
    """Of a mirror's files, by the footers of the first ones; None where there are none, or one cannot be read: what
    looks at the data says so."""
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
    """Of files on this machine: a JSON file is read as a whole, compressed text from the front."""
    try:
        paths = _paths(url)
        num_bytes = sum(path.stat().st_size for path in paths)
    except (OSError, SourceError, MissingTool):
        return None
    name, suffix = paths[0].name, paths[0].suffix
    if suffix == ".parquet" and (found := _mirrored(tuple(paths))) and found.rows:
        return replace(found, in_blocks=int(found.rows * found.row_bytes))
    whole = num_bytes if suffix == ".json" else 0
    blocks = num_bytes if suffix in BLOCK_FORMATS else 0
    rows, row_bytes = FILES.get(name, (None, STREAM_ROW_BYTES))
    return SourceSize(rows, row_bytes, 0, whole, blocks)


def _paths(url: SourceURL) -> list[Path]:
    from nanodag.data import files

    opened = files.open_package_file(url) if url.kind == "package" else files.open_file(url)
    return list(opened.paths)


def text_bytes(url: str, mirror: Path | None = None) -> int:
    """Bytes of text of all rows of a source, of a file that is not compressed at most. A stream, or what is not known,
    counts as endless."""
    size = size_of(url, mirror)
    if size is None:
        return ENDLESS
    return int(size.rows * size.row_bytes) if size.rows is not None else size.in_blocks + size.in_memory or ENDLESS


def bytes_per_token(vocabulary: int) -> float:
    """Bytes of English text in a token of a vocabulary: measured 2.8 at 2,048; 3.8, 4.6 and 4.8 at 8,192, 32,768 and
    150,000, between them along the logarithm."""
    points = ((512, 1.9), (2048, 2.8), (8192, 3.8), (32_768, 4.6), (151_936, 4.8))
    if vocabulary <= points[0][0]:
        return points[0][1]
    for (low, below), (high, above) in pairwise(points):
        if vocabulary <= high:
            return below + (above - below) * (vocabulary / low - 1) / (high / low - 1)
    return points[-1][1]


def held_out_share(source: SourceConfig) -> float:
    """Share of a source's rows that a hash keeps from training; 0 where none is, or a whole file."""
    return float(source.held_out) if isinstance(source.held_out, int | float) else 0.0


def tokens_of_pass(
    sources: Sequence[SourceConfig], vocabulary: int, *, is_chat: bool, mirror: Path | None = None
) -> int | None:
    """Tokens of one pass over a mixture by epochs, what is held out left out; None where a source's size is not
    known."""
    if any(source.weight is not None for source in sources):
        return None
    each = [_tokens_of_rows(source, vocabulary, is_chat=is_chat, mirror=mirror) for source in sources]
    shares = [(1 - held_out_share(source)) * (source.epochs or 1.0) for source in sources]
    known = [tokens * share for tokens, share in zip(each, shares, strict=True) if tokens is not None]
    return int(sum(known)) if len(known) == len(each) else None


def held_out_tokens(
    sources: Sequence[SourceConfig], vocabulary: int, *, is_chat: bool, mirror: Path | None = None
) -> int | None:
    """Tokens that a mixture holds out: of conversations, where there are such beside text. None where that is not
    known; 0 where nothing is held out."""
    held_out = [source for source in sources if source.held_out]
    held_out = [source for source in held_out if source.adapter != "text"] or held_out
    each = [_tokens_of_rows(source, vocabulary, is_chat=is_chat, mirror=mirror) for source in held_out]
    if any(tokens is None for tokens in each) or any(not held_out_share(source) for source in held_out):
        return None
    return int(sum((tokens or 0.0) * held_out_share(s) for tokens, s in zip(each, held_out, strict=True)))


def attended_length(
    sources: Sequence[SourceConfig], vocabulary: int, row: int, *, is_chat: bool, mirror: Path | None = None
) -> int:
    """Tokens of the piece that a token lies in, on average over a mixture, at most a row's: pieces of a packed row do
    not see one another. The row where a source's size is not known."""
    lengths, shares = [], []
    for source in sources:
        size, tokens = size_of(source.url, mirror), _tokens_of_rows(source, vocabulary, is_chat=is_chat, mirror=mirror)
        if size is None or not size.rows or tokens is None:
            return row
        lengths.append(min(float(row), tokens / size.rows))
        shares.append(source.weight if source.weight is not None else tokens * (source.epochs or 1.0))
    return math.ceil(sum(length * share for length, share in zip(lengths, shares, strict=True)) / sum(shares))


def _tokens_of_rows(
    source: SourceConfig, vocabulary: int, *, is_chat: bool, mirror: Path | None = None
) -> float | None:
    """Tokens of all rows of a source, once."""
    size, known = size_of(source.url, mirror), _generated(source.url)
    if size is None or size.rows is None:
        return None
    template = 1 if source.adapter == "text" or not is_chat else CHAT_TOKENS
    return size.rows * (known[1] if known is not None else size.row_bytes / bytes_per_token(vocabulary) + template)


def in_memory(sources: Sequence[SourceConfig]) -> int:
    """Bytes of files that a process holds as a whole."""
    found = {source.url.partition("?")[0]: size_of(source.url) for source in sources}
    return sum(size.in_memory for size in found.values() if size is not None)


def in_windows(sources: Sequence[SourceConfig], mirror: Path | None = None) -> int:
    """Bytes that a process shuffles at once: of each source with blocks a window, or all of a small one."""
    return sum(_window(source.url, mirror) for source in sources)


def _window(url: str, mirror: Path | None) -> int:
    size = size_of(url, mirror)
    if not url.startswith("hub:"):
        return min(WINDOW_BYTES, size.in_blocks) if size is not None else 0
    if size is None or size.rows is None:
        return WINDOW_BYTES
    return min(WINDOW_BYTES, int(size.rows * size.row_bytes))


def held_to_read(sources: Sequence[SourceConfig], mirror: Path | None = None) -> int:
    """Bytes of host memory that a process takes to read a mixture: files that it parses as a whole, windows that it
    shuffles, and the library that reads parquet."""
    is_parquet = any(url.startswith("hub:") or ".parquet" in url for url in (source.url for source in sources))
    windows = int(processes.WINDOWED * in_windows(sources, mirror))
    return int(processes.PARSED * in_memory(sources)) + windows + processes.PARQUET * is_parquet


PACKED = 0.45
"""Bytes of parquet on the hub for each byte of English text in it."""


def downloaded(sources: Sequence[SourceConfig], read_bytes: float) -> int:
    """Bytes that come from the hub when so much text is read of a mixture: never more than its files have."""
    hub = [source for source in sources if source.url.startswith("hub:")]
    sizes = [size_of(source.url) for source in hub]
    packed = int(PACKED * read_bytes * len(hub) / max(1, len(sources)))
    whole = [size.packed for size in sizes if size is not None and size.packed]
    return min(packed, sum(whole)) if len(whole) == len(hub) else packed


# Prompts of known sources, in bytes of text: the mean, and the longest one.
PROMPTS = {"gsm8k": (240, 985)}
GENERATED_LONGEST = 24  # tokens; of what GENERATED names, at most
SOLVED_AT = (135_000_000, 0.02)
"""Parameters of a chat model, and the share of GSM8K that it was seen to solve."""
TEMPLATE_TOKENS = 8
"""Tokens that the chat template puts around a prompt."""
DENSER = 0.9
"""Bytes a token of questions, which have numbers, as a share of those of prose."""
EXTRA_INSTRUCTION = 60
"""Tokens of an instruction that an adapter may put beside a question."""


def mean_prompt(url: str, vocabulary: int) -> float:
    """Tokens of a source's prompt on average; of an unknown one a third of a row."""
    if (generated := _generated(url)) is not None:
        return generated[2]
    known, size = _prompt_bytes(url), size_of(url)
    mean = known[0] if known is not None else size.row_bytes / 3 if size is not None else 400
    return mean / (DENSER * bytes_per_token(vocabulary)) + TEMPLATE_TOKENS


def mean_answer(url: str, vocabulary: int, habit: Habit, *, most: int) -> float:
    """Tokens of an answer to a source's prompts on average, at most so many."""
    if habit == "full":
        return float(most)
    known, size = _prompt_bytes(url), size_of(url)
    if habit == "half" or (_generated(url) is None and (known is None or size is None)):
        return 0.5 * most
    if (generated := _generated(url)) is not None:
        return min(float(most), generated[1] - generated[2])
    assert known is not None and size is not None
    return min(float(most), (size.row_bytes - known[0]) / (DENSER * bytes_per_token(vocabulary)))


def pass_chance(url: str, parameters: int) -> float | None:
    """How likely a model of so many parameters solves a source's problem; None where nobody knows. A chat model of 135
    million solves 2 % of GSM8K; below, the chance is taken to shrink with the size."""
    if _prompt_bytes(url) is None or parameters > SOLVED_AT[0]:
        return None
    return SOLVED_AT[1] * parameters / SOLVED_AT[0]


def kept_groups(samples: int, chance: float | None) -> float:
    """Share of groups of so many samples that have a spread, at a chance to solve each. Where that is not known, it is
    taken to lie as Jeffreys's prior has it, near 0 and near 1 more often than between; 8 samples then keep 0.61."""
    if chance is None:
        return 1 - 2 * math.comb(2 * samples, samples) / 4**samples
    return 1 - chance**samples - (1 - chance) ** samples


def longest_prompt(url: str, vocabulary: int) -> int | None:
    """Tokens of a source's longest prompt; None of one that is not known."""
    if (generated := _generated(url)) is not None:
        return max(GENERATED_LONGEST, int(1.2 * generated[2]))
    known = _prompt_bytes(url)
    if known is None:
        return None
    return int(known[1] / (DENSER * bytes_per_token(vocabulary))) + TEMPLATE_TOKENS + EXTRA_INSTRUCTION


def _prompt_bytes(url: str) -> tuple[int, int] | None:
    return PROMPTS["gsm8k"] if url.startswith("hub:openai/gsm8k") else None


def _generated(url: str) -> tuple[int, float, float] | None:
    """The row of GENERATED that a source's function has."""
    is_known = url.startswith(("python:nanodag.", "reasoning_gym:"))
    return GENERATED.get(parse_url(url).path.rpartition(":")[2]) if is_known else None
