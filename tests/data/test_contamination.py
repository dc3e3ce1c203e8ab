import random

import pytest

from nanodag.data.contamination import contamination
from tests.data.rows import write_rows

SENTENCE = "on the third day the captain counted eleven barrels of salt beside the broken northern gate"  # 16 words


@pytest.fixture
def benchmark(tmp_path):
    rows = [{"question": SENTENCE, "answer": "eleven"}, {"question": "too short to find"}, {"question": SENTENCE[::-1]}]
    return write_rows(tmp_path / "benchmark.jsonl", rows)


def test_a_shared_run_of_13_words_is_found_whatever_case_and_marks(tmp_path, benchmark):
    words = SENTENCE.split()
    copied = "Once: " + ", ".join(words[1:14]).upper() + "!"
    training = write_rows(tmp_path / "training.jsonl", [{"text": "nothing"}, {"messages": [{"content": copied}]}])
    (found,) = contamination([training], [benchmark])
    assert (found.rows, found.rows_found, found.rows_too_short) == (3, 1, 1)
    assert found.complete


def test_12_words_are_not_enough_and_a_run_ends_with_its_field(tmp_path, benchmark):
    words = SENTENCE.split()
    rows = [{"text": " ".join(words[:12])}, {"a": " ".join(words[:8]), "b": " ".join(words[8:])}]
    (found,) = contamination([write_rows(tmp_path / "training.jsonl", rows)], [benchmark])
    assert found.rows_found == 0


def test_counts_equal_those_of_plain_sets(tmp_path):
    draw = random.Random(0)

    def text():
        return " ".join(draw.choices("abc", k=draw.randrange(1, 60)))

    training, benchmark = [{"text": text()} for _ in range(300)], [{"q": text(), "a": [text()]} for _ in range(50)]

    def grams(value):
        words = value.split()
        return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}

    known = set().union(*(grams(row["text"]) for row in training))
    by_row = [grams(row["q"]) | grams(row["a"][0]) for row in benchmark]
    urls = write_rows(tmp_path / "t.jsonl", training), write_rows(tmp_path / "b.jsonl", benchmark)
    (found,) = contamination([urls[0]], [urls[1]], words=5)
    assert found.rows_found == sum(bool(row & known) for row in by_row)
    assert found.rows_too_short == sum(not row for row in by_row)


def test_each_benchmark_is_counted_against_each_source(tmp_path, benchmark):
    same = write_rows(tmp_path / "same.jsonl", [{"text": SENTENCE}])
    other = write_rows(tmp_path / "other.jsonl", [{"text": "x"}])
    empty = write_rows(tmp_path / "empty.jsonl", [{"text": "y"}])
    table = contamination([same, other], [benchmark, empty])
    assert [(o.training, o.benchmark, o.rows_found) for o in table] == [
        (same, benchmark, 1),
        (same, empty, 0),
        (other, benchmark, 0),
        (other, empty, 0),
    ]


def test_reading_stops_at_the_limit_and_says_so(tmp_path, benchmark):
    training = write_rows(tmp_path / "training.jsonl", [{"text": "x " * 50}] * 100 + [{"text": SENTENCE}])
    (found,) = contamination([training], [benchmark], max_training_bytes=1000)
    assert (found.training_bytes, found.complete, found.rows_found) == (10 * 100, False, 0)
