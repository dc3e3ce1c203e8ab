"""Contamination of the training data by a benchmark, word for word: counts of shared 13-grams.

Words are runs of letters and digits in lower case. An n-gram lies within one text field of a row, so that neither the
column order nor a prompt's wording makes one. Training data is streamed; memory holds 8 bytes for each n-gram of the
benchmarks. Hashes are 64 bits: among 10^9 training and 10^6 benchmark n-grams about one false match in 10,000 counts.

Source of the number 13: GPT-3, arXiv:2005.14165, appendix C.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanodag.data.opening import open_source

_WORD = re.compile(r"\w+")
_FILTER_BITS = 24
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Overlap:
    """One benchmark against one training source.

    rows: of the benchmark. rows_too_short: without any n-gram, so never found. rows_found: with at least one n-gram in
    the training text. ngrams, ngrams_found: different ones. training_rows, training_bytes: what was read of the
    training source; complete: all of it.
    """

    benchmark: str
    training: str
    rows: int
    rows_too_short: int
    rows_found: int
    ngrams: int
    ngrams_found: int
    training_rows: int
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
        occurs, rows, num_bytes, complete = _search(url, mirror, words, known, max_training_bytes)
        for benchmark in read:
            hit = occurs[np.searchsorted(known, benchmark.hashes)]
            table.append(
                Overlap(
                    benchmark=benchmark.url,
                    training=url,
                    rows=benchmark.rows,
                    rows_too_short=benchmark.rows - len(np.unique(benchmark.row_of)),
                    rows_found=len(np.unique(benchmark.row_of[hit])),
                    ngrams=len(np.unique(benchmark.hashes)),
                    ngrams_found=len(np.unique(benchmark.hashes[hit])),
                    training_rows=rows,
                    training_bytes=num_bytes,
                    complete=complete,
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


class _Ngrams:
    """Hashes of the n-grams of many texts, found for many texts at once: most are too short to be worth a call."""

    def __init__(self, words: int) -> None:
        self._words = words
        self._hash_of = _WordHashes()
        self._hashes: list[int] = []
        self._lengths: list[int] = []
        self._owners: list[int] = []

    def add(self, text: str, owner: int) -> None:
        """Take in a text; owner is a number that comes back with each of its n-grams."""
        if len(text) < 2 * self._words - 1:  # that many words and the gaps between them
            return
        words = _WORD.findall(text.lower())
        if len(words) >= self._words:
            self._hashes.extend(map(self._hash_of.__getitem__, words))
            self._lengths.append(len(words))
            self._owners.append(owner)

    @property
    def is_large(self) -> bool:
        return len(self._hashes) > 1 << 17

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """(hashes (n,) uint64, owners (n,) int64) of the texts since the last call."""
        singles = np.array(self._hashes, dtype=np.uint64)
        lengths = np.array(self._lengths, dtype=np.int64)
        owners = np.repeat(np.array(self._owners, dtype=np.int64), lengths)
        rest = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(singles))  # words up to the end of the text
        self._hashes, self._lengths, self._owners = [], [], []
        count = max(0, len(singles) - self._words + 1)
        total = np.zeros(count, np.uint64)
        with np.errstate(over="ignore"):
            for place in range(self._words):
                total = total * _MULTIPLIER + singles[place : place + count]
        whole = rest[:count] >= self._words
        return total[whole], owners[:count][whole]


def _texts(value: Any) -> Iterator[str]:
    """Every string inside a row."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _read_benchmark(url: str, mirror: Path | None, words: int) -> _Benchmark:
    parts = [(np.zeros(0, np.uint64), np.zeros(0, np.int64))]
    ngrams = _Ngrams(words)
    rows = 0
    for index, row in open_source(url, mirror).rows():
        rows += 1
        for text in _texts(row):
            ngrams.add(text, index)
        if ngrams.is_large:
            parts.append(ngrams.take())
    parts.append(ngrams.take())
    hashes, row_of = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return _Benchmark(url, rows, row_of, hashes)


def _search(
    url: str, mirror: Path | None, words: int, known: np.ndarray, max_bytes: int
) -> tuple[np.ndarray, int, int, bool]:
    """(which of `known` occur, rows read, bytes read, whether that was all)."""
    occurs = np.zeros(len(known), dtype=bool)
    ngrams = _Ngrams(words)
    rows = num_bytes = 0
    complete = True

    maybe = np.zeros(1 << _FILTER_BITS, dtype=bool)  # by the top bits: spares most n-grams the search below
    maybe[known >> np.uint64(64 - _FILTER_BITS)] = True

    def mark() -> None:
        hashes, _ = ngrams.take()
        hashes = hashes[maybe[hashes >> np.uint64(64 - _FILTER_BITS)]]
        if len(known):
            places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            occurs[places[known[places] == hashes]] = True

    for _, row in open_source(url, mirror).rows():
        if num_bytes >= max_bytes:
            complete = False
            break
        rows += 1
        for text in _texts(row):
            num_bytes += len(text.encode("utf-8", "surrogatepass"))
            ngrams.add(text, rows)
        if ngrams.is_large:
            mark()
    mark()
    return occurs, rows, num_bytes, complete
