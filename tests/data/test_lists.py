import json
import re

import pytest

from nanodag.config.trust import SHIPPED
from nanodag.data.config import SourceConfig
from nanodag.data.lists import add, pick, reverse, sort
from nanodag.data.mixture import Mixture
from nanodag.data.spelling import WORDS, count, spell
from nanodag.rewards.text_rewards import gsm8k


@pytest.mark.parametrize("make", [sort, reverse, pick])
def test_no_problem_is_in_both_splits(make):
    train = {row["question"] for row in make(size=300, seed=0, split="train")}
    test = {row["question"] for row in make(size=300, seed=0, split="test")}
    assert not train & test


def test_answers_about_lists_are_right():
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


def word_of(row):
    return row["answer"].partition(" is spelled")[0]


def test_the_count_is_right_and_so_is_the_way_to_it():
    for row in count(size=60):
        word = word_of(row)
        (letter,) = re.findall(r"I look for (\w):", row["answer"])
        assert word in row["question"] and letter in row["question"]
        assert row["answer"].endswith(f"\n#### {word.count(letter)}")
        assert re.findall(r"^\d+\. (\w)", row["answer"], re.MULTILINE) == list(word)
        assert len(re.findall("that makes", row["answer"])) == word.count(letter)


def test_spelling_gives_every_letter():
    for row in spell(size=20):
        assert row["answer"].replace(", ", "") in row["question"]


def test_no_word_of_the_test_is_spelled_in_training():
    train = {word_of(row) for row in count(size=600, seed=1)}
    test = {word_of(row) for row in count(size=600, seed=1, split="test")}
    assert len(train) > 200 and len(test) > 50 and not train & test
    assert len(set(WORDS)) == len(WORDS)


def test_spelling_is_a_conversation_in_training_and_a_prompt_with_a_verifier_in_evaluation():
    url = "python:nanodag.data.spelling:count?size=3&split=test"
    assert "nanodag.data.spelling:count" in SHIPPED
    source = SourceConfig(url=url, adapter="problem")
    (prompt, *_) = (d.record for d in Mixture([source], kind="prompt", seed=0, once=True, shuffle=False))
    (talk, *_) = (d.record for d in Mixture([source], kind="conversation", seed=0, once=True, shuffle=False))
    assert prompt["reward"] == "gsm8k"
    assert gsm8k(prompt, talk["messages"][1]["content"]).value == 1.0
    assert gsm8k(prompt, "#### 99").value == 0.0
    assert json.dumps(prompt)


def test_a_split_that_has_no_problem_is_refused_and_not_waited_for():
    with pytest.raises(ValueError, match="add-0 has no problem in the split test"):
        next(iter(add(largest=0, split="test")))
