import math

import numpy as np
import pytest

from benchmarks.ngrams import bigram_bits, count_ngrams, unigram_bits

DOCUMENTS = [np.array([0, 1, 0, 1]), np.array([0, 2])]


def test_counts_stop_at_a_documents_end():
    counts = count_ngrams(DOCUMENTS, 3, merge_every=1)
    assert counts.unigrams.tolist() == [3, 2, 1]
    assert dict(zip(counts.pairs.tolist(), counts.pair_counts.tolist())) == {0 * 3 + 1: 2, 1 * 3 + 0: 1, 0 * 3 + 2: 1}


def test_unigram_bits_are_those_worked_out_by_hand():
    # add-one over six tokens and three words: p(1) = 3/9, p(2) = 2/9
    assert unigram_bits(count_ngrams(DOCUMENTS, 3), np.array([0, 1, 2])) == pytest.approx(-math.log2(3 / 9 * 2 / 9))


def test_bigram_bits_are_those_worked_out_by_hand():
    # after 0: c = 3, two kinds. p(1|0) = 1.5/3 + 0.5*2/3 * 3/9; after 2 nothing was seen: p(1) alone.
    expected = -math.log2(1.5 / 3 + 0.5 * 2 / 3 * 3 / 9) - math.log2(2 / 9 * 0.5 * 1 / 1 + 0) - math.log2(3 / 9)
    assert bigram_bits(count_ngrams(DOCUMENTS, 3), np.array([0, 1, 2, 1]), discount=0.5) == pytest.approx(expected)


def test_bigram_probabilities_of_all_words_sum_to_one():
    counts = count_ngrams(DOCUMENTS, 3)
    total = sum(2 ** -bigram_bits(counts, np.array([0, word]), discount=0.7) for word in range(3))
    assert total == pytest.approx(1.0)
