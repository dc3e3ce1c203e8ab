"""Unigram and bigram token models: what a base model must beat before it may be said to have learned anything."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class NgramCounts:
    """Counts over documents. unigrams: (V,) int64. pairs: (N,) int64 sorted keys `first * V + second`; pair_counts:
    (N,) int64. The first token of a document has no predecessor and is counted as a unigram only."""

    vocabulary: int
    unigrams: NDArray[np.int64]
    pairs: NDArray[np.int64]
    pair_counts: NDArray[np.int64]


def count_ngrams(documents: Iterable[Tokens], vocabulary: int, *, merge_every: int = 2_000_000) -> NgramCounts:
    """Counts of tokens and adjacent pairs; holds at most merge_every pairs beside the distinct ones."""
    unigrams = np.zeros(vocabulary, np.int64)
    pairs, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    waiting: list[Tokens] = []
    num_waiting = 0

    def merge() -> None:
        nonlocal pairs, counts, num_waiting
        new, new_counts = np.unique(np.concatenate([np.zeros(0, np.int64), *waiting]), return_counts=True)
        joined, inverse = np.unique(np.concatenate([pairs, new]), return_inverse=True)
        weights = np.concatenate([counts, new_counts])
        counts = np.bincount(inverse, weights=weights, minlength=len(joined)).astype(np.int64)
        pairs, num_waiting = joined, 0
        waiting.clear()

    for tokens in documents:
        unigrams += np.bincount(tokens, minlength=vocabulary)
        waiting.append(tokens[:-1].astype(np.int64) * vocabulary + tokens[1:])
        num_waiting += len(tokens)
        if num_waiting > merge_every:
            merge()
    merge()
    return NgramCounts(vocabulary, unigrams, pairs, counts)


def unigram_bits(counts: NgramCounts, document: Tokens) -> float:
    """Bits that the add-one unigram model needs for a document's tokens after the first."""
    return float(-np.log2(_unigram(counts)[document[1:]]).sum())


def bigram_bits(counts: NgramCounts, document: Tokens, *, discount: float) -> float:
    """Bits that the bigram model needs for a document's tokens after the first.

    p(b | a) = max(c(ab) - D, 0) / c(a) + D * |{b': c(ab') > 0}| / c(a) * p(b); after an unseen a, p(b) alone.
    discount: D in (0, 1).

    Source: interpolated absolute discounting, Ney, Essen and Kneser 1994, doi:10.1006/csla.1994.1001.
    """
    firsts = counts.pairs // counts.vocabulary
    totals = np.bincount(firsts, weights=counts.pair_counts, minlength=counts.vocabulary)
    kinds = np.bincount(firsts, minlength=counts.vocabulary)
    first, second = document[:-1], document[1:]
    keys = first.astype(np.int64) * counts.vocabulary + second
    places = np.minimum(np.searchsorted(counts.pairs, keys), max(0, len(counts.pairs) - 1))
    seen = np.where(counts.pairs[places] == keys, counts.pair_counts[places], 0)
    total = np.maximum(totals[first], 1)
    backed_off = np.where(totals[first] > 0, discount * kinds[first] / total, 1.0)
    probability = np.maximum(seen - discount, 0) / total + backed_off * _unigram(counts)[second]
    return float(-np.log2(probability).sum())


def _unigram(counts: NgramCounts) -> NDArray[np.float64]:
    return (counts.unigrams + 1) / (counts.unigrams.sum() + counts.vocabulary)
