import json
import re

from nanodag.config.trust import SHIPPED
from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.data.spelling import WORDS, count, spell
from nanodag.rewards.text_rewards import gsm8k


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


def test_it_is_a_conversation_in_training_and_a_prompt_with_a_verifier_in_evaluation():
    url = "python:nanodag.data.spelling:count?size=3&split=test"
    assert "nanodag.data.spelling:count" in SHIPPED
    source = SourceConfig(url=url, adapter="problem")
    (prompt, *_) = (d.record for d in Mixture([source], kind="prompt", seed=0, once=True, shuffle=False))
    (talk, *_) = (d.record for d in Mixture([source], kind="conversation", seed=0, once=True, shuffle=False))
    assert prompt["reward"] == "gsm8k"
    assert gsm8k(prompt, talk["messages"][1]["content"]).value == 1.0
    assert gsm8k(prompt, "#### 99").value == 0.0
    assert json.dumps(prompt)
