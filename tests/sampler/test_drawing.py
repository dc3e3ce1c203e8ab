"""Drawing one token per row: the distribution, the reported logprob, the random numbers."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from nanodag.sampler.drawing import DrawSettings, draw, sample_key, uniforms

NUM_ROWS = 20_000
WIDTH = 128


def settings(num_rows, *, top_p=1.0, top_k=0, greedy=False):
    return DrawSettings(
        temperature=np.ones(num_rows, dtype=np.float32),
        greedy=np.full(num_rows, greedy),
        top_p=np.full(num_rows, top_p),
        top_k=np.full(num_rows, top_k),
        keys=np.array([sample_key(0, row) for row in range(num_rows)]),
    )


def random_scores(sharpness, vocab_size=100):
    """(1, WIDTH): ``vocab_size`` scores in random order, then padding."""
    scores = torch.full((1, WIDTH), -torch.inf)
    scores[0, :vocab_size] = sharpness * torch.randn(vocab_size, generator=torch.Generator().manual_seed(5))
    return scores


def drawn(scores, how):
    """The first tokens and logprobs of rows that have the same scores."""
    return draw(scores.repeat(len(how.keys), 1), how, np.zeros(len(how.keys), dtype=np.int64))


def assert_drawn_from(expected, tokens):
    """A chi-square test at about 1 in 10,000, on the tokens expected at least 5 times; the others as one."""
    counts = np.bincount(tokens, minlength=len(expected)).astype(float)
    assert counts[expected == 0].sum() == 0
    wanted = expected * len(tokens)
    common = wanted >= 5
    observed = np.append(counts[common], counts[~common].sum())
    hoped = np.append(wanted[common], wanted[~common].sum())
    statistic = ((observed - hoped) ** 2 / np.maximum(hoped, 1e-9))[hoped > 0].sum()
    freedom = common.sum()
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 8, (statistic, freedom)


LIMITS = [(1.0, 0), (0.9, 0), (0.3, 0), (0.02, 0), (1.0, 1), (1.0, 7), (1.0, 500), (0.8, 12)]


# Of tied scores (sharpness 0) it is not defined which ones top-p and top-k keep.
@pytest.mark.parametrize(
    ("sharpness", "top_p", "top_k"), [(0.0, 1.0, 0), *((s, p, k) for s in (1.0, 4.0) for p, k in LIMITS)]
)
def test_tokens_follow_the_distribution_that_transformers_warpers_leave(sharpness, top_p, top_k):
    scores = random_scores(sharpness)
    warped = scores.clone()
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    expected = torch.softmax(warped.double(), -1)[0].numpy()
    tokens, _ = drawn(scores, settings(NUM_ROWS, top_p=top_p, top_k=top_k))
    assert_drawn_from(expected, tokens)


@pytest.mark.parametrize(
    ("top_p", "top_k", "greedy"), [(1.0, 0, False), (0.5, 0, False), (0.7, 5, False), (1, 0, True)]
)
def test_the_logprob_is_that_of_the_whole_distribution(top_p, top_k, greedy):
    scores = random_scores(2.0)
    tokens, logprobs = drawn(scores, settings(50, top_p=top_p, top_k=top_k, greedy=greedy))
    np.testing.assert_allclose(logprobs, torch.log_softmax(scores.double(), -1)[0].numpy()[tokens], atol=1e-6)


def test_greedy_rows_take_the_likeliest_token_beside_rows_that_are_drawn():
    scores, mixed = random_scores(1.0), settings(40)
    mixed.greedy[::2] = True
    tokens, _ = drawn(scores, mixed)
    assert set(tokens[::2]) == {int(scores[0].argmax())}
    assert len(set(tokens[1::2])) > 5


def test_a_row_with_its_own_top_k_does_not_change_its_neighbours():
    scores, mixed = random_scores(1.0), settings(40)
    plain, _ = drawn(scores, settings(40))
    mixed.top_k[:20] = 3
    mixed.top_p[20:30] = 0.4
    tokens, _ = drawn(scores, mixed)
    assert tokens[30:].tolist() == plain[30:].tolist()
    assert set(tokens[:20]) <= set(scores[0].topk(3).indices.tolist())


def test_a_token_of_probability_zero_is_never_drawn():
    scores = torch.full((1, WIDTH), -torch.inf)
    scores[0, [3, 64, 127]] = torch.tensor([0.0, -80.0, -5.0])
    tokens, logprobs = drawn(scores, settings(NUM_ROWS))
    assert set(tokens) <= {3, 64, 127}
    assert np.isfinite(logprobs).all()


def test_a_row_of_nan_has_a_logprob_of_nan():
    scores = random_scores(1.0).repeat(2, 1)
    scores[1] = torch.nan
    _, logprobs = draw(scores, settings(2), np.zeros(2, dtype=np.int64))
    assert np.isfinite(logprobs[0])
    assert np.isnan(logprobs[1])


def test_random_numbers_are_those_of_splitmix64():
    # The first three outputs of the reference implementation (prng.di.unimi.it/splitmix64.c) for seed 1234567.
    expected = np.array([6457827717110365317, 3203168211198807973, 9817491932198370423], dtype=np.uint64)
    found = uniforms(np.full(3, 1234567, dtype=np.uint64), np.arange(3))
    np.testing.assert_array_equal(found, (expected >> np.uint64(11)) * 2.0**-53)


def test_random_numbers_differ_by_seed_sample_token_and_attempt():
    keys = np.array([sample_key(seed, sample) for seed in (-1, 0, 1, 1 << 70) for sample in range(3)])
    numbers = [uniforms(keys, np.full(12, count), attempt) for count in range(5) for attempt in range(3)]
    # 2^70 and 0 are the same modulo 2^64, and nothing else is.
    assert len(np.unique(numbers)) == 9 * 15
