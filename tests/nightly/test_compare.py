"""What counts as worse: hand-made answers, p-values worked out by hand."""

import pytest

from nanodag.evaluation.paired import holm
from nanodag.nightly.compare import compare
from tests.nightly.made_nights import night_record, publish_eval

RIGHT, WRONG = [1], [0]


def test_holm_multiplies_the_smallest_most_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_ten_items_lost_and_none_won_is_worse_and_three_are_not(store, tmp_path):
    before = publish_eval(store, tmp_path / "a", "a", RIGHT * 100)
    lost_ten = publish_eval(store, tmp_path / "b", "b", WRONG * 10 + RIGHT * 90)
    lost_three = publish_eval(store, tmp_path / "c", "c", WRONG * 3 + RIGHT * 97)
    earlier = [night_record("nightly-1", [before])]
    (found,) = compare(store, [lost_ten], earlier, false_alarms=0.01)
    assert found.is_worse and found.p_worse == pytest.approx(0.5**10) and found.against == "last night"
    (found,) = compare(store, [lost_three], earlier, false_alarms=0.01)
    assert not found.is_worse and found.p_worse == pytest.approx(0.5**3)
    assert "main/sft sort exact_match 97.0 %, 100.0 % before: −3.0 points" in str(found)


def test_better_is_never_worse_also_where_lower_is_better(store, tmp_path):
    low = publish_eval(store, tmp_path / "a", "a", WRONG * 20 + RIGHT * 80)
    high = publish_eval(store, tmp_path / "b", "b", RIGHT * 100)
    (found,) = compare(store, [high], [night_record("n", [low])], false_alarms=0.05)
    assert not found.is_worse and found.p_worse == 1.0
    (found,) = compare(
        store,
        [high.changed(higher_is_better=False)],
        [night_record("n", [low.changed(higher_is_better=False)])],
        false_alarms=0.05,
    )
    assert found.is_worse


def test_a_slow_decline_is_seen_against_the_best(store, tmp_path):
    nights = [publish_eval(store, tmp_path / f"{n}", f"{n}", WRONG * (4 * n) + RIGHT * (100 - 4 * n)) for n in range(5)]
    earlier = [night_record(f"nightly-{n}", [score]) for n, score in enumerate(nights[:4])]
    last, best = compare(store, nights[4:], earlier, false_alarms=0.01)
    assert (last.against, last.night, last.is_worse) == ("last night", "nightly-3", False)
    assert (best.against, best.night, best.is_worse) == ("best", "nightly-0", True)
    assert best.candidates == 4 and best.p_worse == pytest.approx(4 * 0.5**16)


def test_the_best_must_be_beaten_by_more_the_more_there_were(store, tmp_path):
    new = publish_eval(store, tmp_path / "new", "new", WRONG * 8 + RIGHT * 92)
    best = publish_eval(store, tmp_path / "best", "best", RIGHT * 100)
    others = [publish_eval(store, tmp_path / f"{n}", f"{n}", [1] * n + [0] * 8 + [1] * (92 - n)) for n in range(1, 6)]
    few = [night_record("n0", [best]), night_record("n1", others[:1])]
    many = [night_record(f"n{i}", [score]) for i, score in enumerate([best, *others])]
    assert compare(store, [new], few, false_alarms=0.02)[1].is_worse, "2 x 1/256, twice over by Holm"
    assert not compare(store, [new], many, false_alarms=0.02)[1].is_worse, "6 x 1/256 is above 2 %"


def test_the_same_answers_are_not_tested_again(store, tmp_path):
    best = publish_eval(store, tmp_path / "a", "a", RIGHT * 100)
    worse = publish_eval(store, tmp_path / "b", "b", WRONG * 50 + RIGHT * 50)
    (found,) = compare(store, [worse], [night_record("n1", [best]), night_record("n2", [worse])], false_alarms=0.01)
    assert found.found is None and found.why == "the same answers to the same items" and not found.is_worse


def test_other_items_another_metric_or_a_lost_artifact_are_no_comparison(store, tmp_path):
    new = publish_eval(store, tmp_path / "new", "new", WRONG * 100)
    fewer = publish_eval(store, tmp_path / "fewer", "fewer", RIGHT * 50)
    (found,) = compare(store, [new], [night_record("n", [fewer])], false_alarms=0.01)
    assert found.found is None and "needs the same items on both sides" in found.why and not found.is_worse
    other = publish_eval(store, tmp_path / "other", "other", RIGHT * 100, metric="flexible")
    assert compare(store, [new], [night_record("n", [other])], false_alarms=0.01) == []
    drawn = publish_eval(store, tmp_path / "drawn", "drawn", RIGHT * 100, sampling="4 samples, temperature 1")
    assert compare(store, [new], [night_record("n", [drawn])], false_alarms=0.01) == []
    gone = publish_eval(store, tmp_path / "gone", "gone", RIGHT * 100).changed(attempt="0009")
    (found,) = compare(store, [new], [night_record("n", [gone])], false_alarms=0.01)
    assert found.found is None and "There is no attempt 0009" in found.why


def test_twenty_benchmarks_of_which_one_looks_bad_by_chance_raise_no_alarm(store, tmp_path):
    before = publish_eval(store, tmp_path / "a", "a", RIGHT * 100)
    same = publish_eval(store, tmp_path / "b", "b", RIGHT * 99 + WRONG)
    unlucky = publish_eval(store, tmp_path / "c", "c", WRONG * 8 + RIGHT * 92)  # p = 1/256: below 1 % on its own
    others = [same.changed(eval=f"e{n}") for n in range(19)]
    earlier = [night_record("n", [before, *(before.changed(eval=f"e{n}") for n in range(19))])]
    assert compare(store, [unlucky], earlier, false_alarms=0.01)[0].is_worse
    assert not any(c.is_worse for c in compare(store, [unlucky, *others], earlier, false_alarms=0.01))
