"""What counts as worse: hand-made answers, p-values worked out by hand."""

import pytest

from nanodag.evaluation.paired import holm
from nanodag.nightly.findings import compare
from tests.nightly.made_nights import night_record

RIGHT, WRONG = [1], [0]


def test_holm_multiplies_the_smallest_most_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.fixture
def against(store):
    """Compare scores with those of nights before."""

    def compared(new, *nights, false_alarms=0.01):
        records = [night_record(f"nightly-{number}", scores) for number, scores in enumerate(nights)]
        return compare(store, new, records, false_alarms=false_alarms)

    return compared


def test_ten_items_lost_and_none_won_is_worse_and_three_are_not(scored, against):
    before = scored("a", RIGHT * 100)
    (found,) = against([scored("b", WRONG * 10 + RIGHT * 90)], [before])
    assert found.is_worse and found.p_worse == pytest.approx(0.5**10) and found.against == "last night"
    (found,) = against([scored("c", WRONG * 3 + RIGHT * 97)], [before])
    assert not found.is_worse and found.p_worse == pytest.approx(0.5**3)
    assert "main/sft sort exact_match 97.0 %, 100.0 % before: −3.0 points" in str(found)


def test_better_is_never_worse_also_where_lower_is_better(scored, against):
    low, high = scored("a", WRONG * 20 + RIGHT * 80), scored("b", RIGHT * 100)
    (found,) = against([high], [low], false_alarms=0.05)
    assert not found.is_worse and found.p_worse == 1.0
    low, high = (score.changed(higher_is_better=False) for score in (low, high))
    (found,) = against([high], [low], false_alarms=0.05)
    assert found.is_worse


def test_a_slow_decline_is_seen_against_the_best(scored, against):
    *before, new = (scored(f"{n}", WRONG * (4 * n) + RIGHT * (100 - 4 * n)) for n in range(5))
    last, best = against([new], *([score] for score in before))
    assert (last.against, last.night, last.is_worse) == ("last night", "nightly-3", False)
    assert (best.against, best.night, best.is_worse) == ("best", "nightly-0", True)
    assert best.candidates == 4 and best.p_worse == pytest.approx(4 * 0.5**16)


def test_the_best_must_be_beaten_by_more_the_more_there_were(scored, against):
    new, best = scored("new", WRONG * 8 + RIGHT * 92), scored("best", RIGHT * 100)
    others = [[scored(f"{n}", RIGHT * n + WRONG * 8 + RIGHT * (92 - n))] for n in range(1, 6)]
    assert against([new], [best], others[0], false_alarms=0.02)[1].is_worse, "2 x 1/256, twice over by Holm"
    assert not against([new], [best], *others, false_alarms=0.02)[1].is_worse, "6 x 1/256 is above 2 %"


def test_the_same_answers_are_not_tested_again(scored, against):
    best, worse = scored("a", RIGHT * 100), scored("b", WRONG * 50 + RIGHT * 50)
    (found,) = against([worse], [best], [worse])
    assert found.found is None and found.why == "the same answers to the same items" and not found.is_worse


def test_other_items_another_metric_or_a_lost_artifact_are_no_comparison(scored, against):
    new, right = scored("new", WRONG * 100), RIGHT * 100
    for about in ({"metric": "flexible"}, {"sampling": "4 samples, temperature 1"}):
        assert against([new], [scored("other", right, **about)]) == []
    fewer, gone = scored("fewer", RIGHT * 50), scored("gone", right).changed(attempt="0009")
    for before, why in ((fewer, "needs the same items on both sides"), (gone, "There is no attempt 0009")):
        (found,) = against([new], [before])
        assert found.found is None and why in found.why and not found.is_worse


def test_twenty_benchmarks_of_which_one_looks_bad_by_chance_raise_no_alarm(scored, against):
    before, same = scored("a", RIGHT * 100), scored("b", RIGHT * 99 + WRONG)
    unlucky = scored("c", WRONG * 8 + RIGHT * 92)  # p = 1/256: below 1 % on its own
    earlier = [before, *(before.changed(eval=f"e{n}") for n in range(19))]
    assert against([unlucky], earlier)[0].is_worse
    others = [same.changed(eval=f"e{n}") for n in range(19)]
    assert not any(found.is_worse for found in against([unlucky, *others], earlier))
