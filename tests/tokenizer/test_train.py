import pytest

from nanodag.errors import ConfigError
from nanodag.tokenizer.encoding import Encoding
from nanodag.tokenizer.train import SAMPLES, TrainingText, train_tokenizer
from tests.data.rows import source_of


def test_a_tokenizer_is_trained_and_measured(tmp_path):
    source = source_of(tmp_path / "text.jsonl", [{"text": line} for t in SAMPLES.values() for line in t.splitlines()])
    metrics = train_tokenizer(TrainingText([source], 0, 10**6), 500, tmp_path / "one")
    assert metrics["vocabulary"] == Encoding(tmp_path / "one").size == 500
    assert metrics["training_bytes"] == sum(len(t.encode()) - t.count("\n") for t in SAMPLES.values())
    english = SAMPLES["english"]
    tokens = len(Encoding(tmp_path / "one").encode(english))
    assert metrics["bytes_per_token_english"] == pytest.approx(len(english) / tokens, abs=1e-4)
    assert all(metrics[f"bytes_per_token_{kind}"] > 1 for kind in SAMPLES)


def test_text_ends_at_its_limit_and_no_row_is_read_twice(tmp_path):
    small = source_of(tmp_path / "a.jsonl", [{"text": f"a{i:04d}"} for i in range(10)])
    large = source_of(tmp_path / "b.jsonl", [{"text": f"b{i:04d}"} for i in range(100)])
    weighted = [source.model_copy(update={"weight": 1.0}) for source in (small, large)]
    everything = list(TrainingText(weighted, 0, 10**6))
    assert sorted(everything) == [f"a{i:04d}" for i in range(10)] + [f"b{i:04d}" for i in range(100)]
    text = TrainingText(weighted, 0, 50)
    assert len(list(text)) == text.num_documents == 10
    assert text.num_bytes == 50


def test_a_long_document_does_not_outweigh_the_others(tmp_path):
    text = TrainingText([source_of(tmp_path / "a.jsonl", [{"text": "x" * 50_000}])], 0, 10**6)
    assert [len(t) for t in text] == [10_000]


def test_no_text_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="The text is empty"):
        train_tokenizer(TrainingText([source_of(tmp_path / "empty.jsonl", [])], 0, 10**6), 300, tmp_path / "t")
