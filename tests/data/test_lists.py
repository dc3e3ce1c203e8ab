import pytest

from nanodag.data.lists import add, pick, reverse, sort
from nanodag.data.spelling import count


@pytest.mark.parametrize("make", [sort, reverse, pick])
def test_no_problem_is_in_both_splits(make):
    train = {row["question"] for row in make(size=300, seed=0, split="train")}
    test = {row["question"] for row in make(size=300, seed=0, split="test")}
    assert not train & test


def test_answers_are_right():
    for row in sort(count=4, size=20):
        numbers = [int(n) for n in row["question"].removeprefix("Sort: ").split()]
        assert row["answer"] == " ".join(str(n) for n in sorted(numbers)) and len(numbers) == 4
    for row in reverse(size=20):
        assert row["answer"].split()[::-1] == row["question"].removeprefix("Reverse: ").split()
    for row in add(size=20):
        a, _, b = row["question"].removeprefix("Add: ").split()
        assert int(row["answer"]) == int(a) + int(b)
    places = {"First": 0, "Second": 1, "Last": -1}
    for row in pick(size=20):
        word, _, numbers = row["question"].partition(" of: ")
        assert row["answer"] == numbers.split()[places[word]]


def test_rows_end_where_the_size_says():
    with pytest.raises(IndexError):
        sort(size=3)[3]
    assert len(list(sort(size=3))) == 3


@pytest.mark.parametrize("make", [sort, count])
def test_a_row_depends_on_its_index_and_the_seed_alone_and_what_has_no_rows_is_refused(make):
    assert make(size=10, seed=3)[7] == make(size=1000, seed=3)[7] != make(size=10, seed=4)[7]
    with pytest.raises(ValueError, match="neither 'train' nor 'test'"):
        make(split="valid")
    with pytest.raises(ValueError, match="below 1"):
        make(size=0)
