"""Written answers, and metrics over the samples of an item."""

import math
from itertools import combinations

import numpy as np
import pytest

from nanodag.config.kinds.evaluation import BenchmarkConfig, ThinkingConfig
from nanodag.evaluation.intervals import score_of
from nanodag.evaluation.results import Answer, answer_of, majority, pass_at


@pytest.mark.parametrize("num_samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_right_one(num_samples):
    for num_right in range(num_samples + 1):
        samples = [1] * num_right + [0] * (num_samples - num_right)
        for k in range(1, num_samples + 1):
            choices = list(combinations(samples, k))
            assert pass_at(k, num_samples, num_right) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_is_the_product_of_the_paper_also_for_many_samples():
    # Codex paper, figure 3: 1 - prod(1 - k / arange(n - c + 1, n + 1))
    for n, c, k in ((200, 3, 100), (200, 1, 1), (1000, 400, 10), (64, 63, 2), (64, 60, 8)):
        paper = 1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
        assert pass_at(k, n, c) == pytest.approx(paper, rel=1e-12)


@pytest.mark.parametrize(("parsed", "right", "expected"), [
    (["7", "7", "8"], "7", 1.0), (["7", "8", "8"], "7", 0.0),
    (["7", "8"], "7", 0.5),  # as many votes: as if one were drawn
    (["7", "8", "9", "9", "8", "7"], "9", 1 / 3),
    (["", "", "", "7"], "7", 1.0),  # what could not be parsed has no vote
    (["", "", ""], "7", 0.0),
])  # fmt: skip
def test_the_majority_of_parsed_answers_counts_and_ties_share(parsed, right, expected):
    scores = [float(answer == right) for answer in parsed]
    assert majority(scores, parsed) == pytest.approx(expected)
    shuffled = [number for number in reversed(range(len(parsed)))]
    assert majority([scores[i] for i in shuffled], [parsed[i] for i in shuffled]) == pytest.approx(expected)


def test_the_standard_error_over_items_is_the_clustered_one_over_answers():
    """Miller, arXiv:2411.00640: sqrt(sum over clusters of (sum of deviations)^2) / number of answers."""
    drawn = np.random.default_rng(0).random((30, 8)) < np.linspace(0.1, 0.9, 30)[:, None]
    deviations = drawn - drawn.mean()
    clustered = math.sqrt((deviations.sum(axis=1) ** 2).sum()) / drawn.size
    naive = drawn.std(ddof=1) / math.sqrt(drawn.size)
    found = score_of(list(drawn.mean(axis=1)))
    assert found.stderr == pytest.approx(clustered * math.sqrt(30 / 29))  # for the one mean that was estimated
    assert found.stderr > 1.5 * naive


def config(**given):
    return BenchmarkConfig(name="b", **given)


@pytest.mark.parametrize(("given", "said"), [
    ({"num_samples": 4}, "num_samples 4 means nothing at temperature 0"),
    ({"top_p": 0.9}, "top_p 0.9 means nothing at temperature 0"),
    ({"top_k": 20}, "top_k 20 means nothing at temperature 0"),
    ({"num_samples": 4, "temperature": 1, "metrics": ["pass@5"]}, "pass@5 is of at most num_samples, which is 4"),
    ({"num_samples": 4, "temperature": 1, "metrics": ["maj@2"]}, "maj@2 is of all of num_samples.* write maj@4"),
    ({"num_samples": 2, "temperature": 1, "metrics": ["avg@2", "avg@2"]}, "avg@2 stands twice"),
    ({"metrics": ["best@1"]}, "pattern"), ({"temperature": -1}, "greater than or equal"),
    ({"stop": [""]}, "at least 1 character"),
])  # fmt: skip
def test_settings_that_cannot_hold_together_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        config(**given)


TAGS = ThinkingConfig()


@pytest.mark.parametrize(("text", "is_open", "answer", "thinking"), [
    ("<think>a</think>\n\nb", False, "b", "a"),
    ("a</think>b", False, "b", "a"),  # the prompt began to think
    ("a</think>b", True, "b", "a"), ("<think></think>b", False, "b", ""),
    ("<think>a", False, "", "a"),  # it did not end
    ("a", True, "", "a"),
    ("x<think>a</think>y<think>b</think>z", False, "z", "a</think>y<think>b"),
    ("a", False, "a", ""), ("", False, "", ""),
])  # fmt: skip
def test_the_answer_is_what_stands_behind_thinking(text, is_open, answer, thinking):
    found = answer_of(text, ending="length", tags=TAGS, is_open=is_open)
    assert (found, found.thinking, found.ending) == (answer, thinking, "length")


def test_without_tags_a_text_is_its_own_answer():
    found = answer_of("<think>a</think>b", ending="stop", tags=None, is_open=True)
    assert (found, found.thinking, isinstance(found, Answer)) == ("<think>a</think>b", "", True)
