import json
import math

import numpy as np
import pytest
from scipy.stats import ttest_rel

from nanodag.errors import SourceError
from nanodag.evaluation.paired import paired
from tests.data.rows import write_rows


def records(scores, metric="acc", weights=None):
    found = [{"id": f"item{n}", "scores": {metric: score}} for n, score in enumerate(scores)]
    for record, weight in zip(found, weights or [], strict=False):
        record["weight"] = weight
    return found


BEFORE = records([0, 0, 0, 0, 1, 1, 1, 1, 0, 0])
AFTER = records([1, 1, 1, 0, 1, 1, 1, 0, 0, 0])


def test_the_difference_counts_items_that_changed():
    found = paired(BEFORE, AFTER, "acc")
    assert (found.value_a, found.value_b, found.difference) == (0.4, 0.6, pytest.approx(0.2))
    assert (found.num_higher, found.num_lower, found.num_items) == (3, 1, 10)
    # differences +1 +1 +1 -1 and six 0, mean .2: sum of squares 4 - 10 * .04 = 3.6; sqrt(3.6 / 9 / 10) = .2
    assert found.stderr == pytest.approx(0.2)
    # 4 changed: 2 * (C(4,0) + C(4,1)) / 16
    assert found.p_value == 0.625


def test_order_of_records_does_not_matter():
    assert paired(BEFORE[::-1], AFTER[3:] + AFTER[:3], "acc") == paired(BEFORE, AFTER, "acc")


def test_scores_that_are_not_right_or_wrong_are_compared_by_students_t():
    before, after = [0.1, 0.5, 0.3, 0.9, 0.2], [0.3, 0.4, 0.8, 1.0, 0.6]
    found, expected = paired(records(before), records(after), "acc"), ttest_rel(after, before)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))


@pytest.mark.parametrize("spread_of_lengths", [0.0, 1.0])  # a score's noise falls with the length of its document
@pytest.mark.parametrize("num_items", [5, 10, 20, 50])
def test_at_most_six_of_a_hundred_equal_models_are_called_different(num_items, spread_of_lengths):
    generator = np.random.default_rng(1)
    weights = np.exp(spread_of_lengths * generator.normal(size=(1500, num_items)))
    draws = generator.normal(size=(1500, num_items)) / weights**0.5
    zeros = [0.0] * num_items
    called = [
        paired(records(zeros, weights=of), records(scores, weights=of), "acc").p_value < 0.05
        for scores, of in zip(draws.tolist(), weights.tolist(), strict=True)
    ]
    assert np.mean(called) <= 0.06


def test_differences_without_spread_are_judged_by_their_signs_and_stay_within_the_range():
    found = paired(records([0.1, 0.2, 0.3, 0.4]), records([0.6, 0.7, 0.8, 0.9]), "acc")
    assert found.p_value == 2 / 2**4  # as rare as four heads or four tails
    far = paired(records([0.0, 0.1]), records([1.0, 0.3]), "acc")
    assert (far.low, far.high) == (-1.0, 1.0)


def test_the_same_model_twice_shows_no_difference():
    found = paired(BEFORE, BEFORE, "acc")
    assert (found.difference, found.low, found.high, found.p_value) == (0, 0, 0, 1.0)


def test_documents_count_by_their_bytes():
    before = records([2.0, 1.0], "bits_per_byte", [300, 100])
    after = records([1.0, 2.0], "bits_per_byte", [300, 100])
    found = paired(before, after, "bits_per_byte")
    assert (found.value_a, found.value_b, found.difference) == (1.75, 1.25, -0.5)


def test_other_items_are_refused(tmp_path):
    write_rows(tmp_path / "b.jsonl", AFTER[:-1])
    with pytest.raises(SourceError, match="1 are only in a, 0 only in b"):
        paired(BEFORE, tmp_path / "b.jsonl", "acc")
    with pytest.raises(SourceError, match="has no metric 'f1'; it has \\['acc'\\]"):
        paired(BEFORE, AFTER, "f1")


@pytest.mark.parametrize(("line", "why"), [
    ({"id": "y"}, r"a\.jsonl, line 1"), ({"id": ["x"], "scores": {}}, "line 1: not a record"),
    ({"id": "x", "scores": [1]}, "line 1: not a record"),
    ({"id": "x", "scores": {"acc": "1"}}, "Item x has acc '1' of weight 1.0; a score is a number"),
    ({"id": "x", "scores": {"acc": math.nan}}, "acc nan"),
    ({"id": "x", "scores": {"acc": 1}, "weight": -1}, "of weight -1"),
])  # fmt: skip
def test_what_a_foreign_store_may_call_a_record_is_refused_with_its_place(tmp_path, line, why):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(SourceError, match=why):
        paired(path, path, "acc")


def test_records_with_half_a_character_and_equal_items_are_compared(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"id": "x", "scores": {"acc": 1}, "output": "\ud800"}, ensure_ascii=False) + "\n"
    path.write_bytes(2 * line.encode("utf-8", "surrogatepass"))
    assert paired(path, path, "acc").num_items == 2


def test_what_two_parts_of_a_benchmark_differ_in_is_no_noise():
    def side(first, second):
        scores = [("easy", score, 1 / 4) for score in first] + [("hard", score, 1 / 2) for score in second]
        return [
            {"id": f"{number}", "part": part, "weight": weight, "scores": {"core": score}}
            for number, (part, score, weight) in enumerate(scores)
        ]

    before = side([0.5] * 4, [0.5] * 2)
    found = paired(before, side([1.5] * 4, [0.5] * 2), "core")
    assert (found.difference, found.stderr, found.low, found.high) == (0.5, 0.0, 0.5, 0.5)
    # Variances of the parts' means: 1/4 * (1/3) and 1/2 * 2, over the two parts squared.
    found = paired(before, side([1.5, 0.5, 0.5, 1.5], [2.5, 0.5]), "core")
    assert (found.difference, found.stderr) == (0.75, pytest.approx(math.sqrt((1 / 12 + 1) / 4)))
