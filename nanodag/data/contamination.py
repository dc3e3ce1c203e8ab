"""Contamination of the training data by a benchmark, word for word: counts of shared 13-grams.

Words are runs of letters and digits in lower case. An n-gram lies within one text field of a row, so that neither the
column order nor a prompt's wording makes one. Training data is streamed; memory holds 8 bytes for each n-gram of the
benchmarks. Hashes are 64 bits: among 10^9 training and 10^6 benchmark n-grams about one false match in 10,000 counts.

Source of the number 13: GPT-3, arXiv:2005.14165, appendix C.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanodag.data.opening import open_source
from nanodag.data.sources import Source

_WORD = re.compile(r"\w+")
_FILTER_BITS = 24
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Overlap:
    """One benchmark against one training source.

    rows: of the benchmark. rows_too_short: without any n-gram, so never found. rows_found: with an n-gram in the
    training text. training_bytes: read; complete: all of them.
    """

    benchmark: str
    training: str
    rows: int
    rows_too_short: int
    rows_found: int
    training_bytes: int
    complete: bool


@dataclass(frozen=True)
class _Benchmark:
    url: str
    rows: int
    row_of: np.ndarray  # (n,) int64, ascending
    hashes: np.ndarray  # (n,) uint64


def contamination(
    training: Sequence[str],
    benchmarks: Sequence[str],
    *,
    mirror: Path | None = None,
    words: int = 13,
    max_training_bytes: int = 2_000_000_000,
) -> list[Overlap]:
    """One Overlap for each benchmark and training source, given by URL.

    max_training_bytes: of each training source, after which reading stops and the count says so.
    """
    read = [_read_benchmark(url, mirror, words) for url in benchmarks]
    known = np.unique(np.concatenate([b.hashes for b in read])) if read else np.zeros(0, np.uint64)
    table = []
    for url in training:
        reading = _Reading(open_source(url, mirror), max_training_bytes)
        occurs = _search(reading, words, known)
        for benchmark in read:
            hit = occurs[np.searchsorted(known, benchmark.hashes)]
            table.append(
                Overlap(
                    benchmark=benchmark.url,
                    training=url,
                    rows=benchmark.rows,
                    rows_too_short=benchmark.rows - len(np.unique(benchmark.row_of)),
                    rows_found=len(np.unique(benchmark.row_of[hit])),
                    training_bytes=reading.num_bytes,
                    complete=reading.complete,
                )
            )
    return table


class _WordHashes(dict[str, int]):
    """Word -> 64-bit hash; emptied when it grows beyond a million words."""

    def __missing__(self, word: str) -> int:
        if len(self) >= 1_000_000:
            self.clear()
        value = int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
        self[word] = value
        return value


def _ngrams(texts: Iterable[tuple[str, int]], words: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(hashes (n,) uint64, owners (n,) int64) of the n-grams of texts, each text with a number that owns its n-grams:
    found for many texts at once, for most are too short to be worth a call."""
    hash_of = _WordHashes()
    singles: list[int] = []
    lengths: list[int] = []
    owners: list[int] = []
    for text, owner in texts:
        if len(text) < 2 * words - 1:  # that many words and the gaps between them
            continue
        text_words = _WORD.findall(text.lower())
        if len(text_words) >= words:
            singles.extend(map(hash_of.__getitem__, text_words))
            lengths.append(len(text_words))
            owners.append(owner)
        if len(singles) > 1 << 17:
            yield _joined(singles, lengths, owners, words)
            singles, lengths, owners = [], [], []
    yield _joined(singles, lengths, owners, words)


def _joined(singles: list[int], lengths: list[int], owners: list[int], words: int) -> tuple[np.ndarray, np.ndarray]:
    """As `_ngrams`. singles: hashes of the words of all texts. lengths, owners: of each text."""
    hashes = np.array(singles, dtype=np.uint64)
    sizes = np.array(lengths, dtype=np.int64)
    rest = np.repeat(np.cumsum(sizes), sizes) - np.arange(len(hashes))  # words up to the end of the text
    count = max(0, len(hashes) - words + 1)
    total = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        for place in range(words):
            total = total * _MULTIPLIER + hashes[place : place + count]
    whole = rest[:count] >= words
    return total[whole], np.repeat(np.array(owners, dtype=np.int64), sizes)[:count][whole]


def texts_in(value: Any) -> Iterator[str]:
    """Every string inside a row."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts_in(inner)


@dataclass
class _Reading:
    """The texts of a source, each with the number of its row, from 1; counted while they are read, up to max_bytes."""

    source: Source
    max_bytes: float = math.inf
    rows: int = 0
    num_bytes: int = 0
    complete: bool = True

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for _, row in self.source.rows():
            if self.num_bytes >= self.max_bytes:
                self.complete = False
                return
            self.rows += 1
            for text in texts_in(row):
                self.num_bytes += len(text.encode("utf-8", "surrogatepass"))
                yield text, self.rows


def _read_benchmark(url: str, mirror: Path | None, words: int) -> _Benchmark:
    reading = _Reading(open_source(url, mirror))
    hashes, row_of = (np.concatenate(arrays) for arrays in zip(*_ngrams(reading, words), strict=True))
    return _Benchmark(url, reading.rows, row_of, hashes)


def _search(reading: _Reading, words: int, known: np.ndarray) -> np.ndarray:
    """(len(known),) bool: which of `known` occur in the texts."""
    occurs = np.zeros(len(known), dtype=bool)
    maybe = np.zeros(1 << _FILTER_BITS, dtype=bool)  # by the top bits: spares most n-grams the search below
    maybe[known >> np.uint64(64 - _FILTER_BITS)] = True
    for hashes, _ in _ngrams(reading, words):
        hashes = hashes[maybe[hashes >> np.uint64(64 - _FILTER_BITS)]]
        if len(known):
            places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            occurs[places[known[places] == hashes]] = True
    return occurs
