import pytest

from nanodag.data.adapters import open_adapter
from nanodag.data.config import SourceConfig
from nanodag.data.records import held_out_score
from nanodag.errors import ConfigError, SourceError
from nanodag.evaluation.items import continuations, documents, problems, rows, select
from tests.data.rows import write_rows


def asked(read, source, limit=0, seed=0, **more):
    return read(benchmark="b", source={"url": source} | more, limit=limit, seed=seed, mirror="", num_fewshot=0)["test"]


def test_a_limit_draws_the_same_items_whatever_their_order():
    pairs = [({"n": n}, {"n": n}) for n in range(100)]
    drawn = select(pairs, 10, seed=1)
    assert [item["n"] for item in drawn] == sorted(item["n"] for item in drawn)
    assert [item["n"] for item in drawn] != list(range(10))
    assert {i["item_id"] for i in drawn} == {i["item_id"] for i in select(pairs[::-1], 10, seed=1)}
    assert {i["item_id"] for i in drawn} != {i["item_id"] for i in select(pairs, 10, seed=2)}
    assert {i["item_id"] for i in drawn} < {i["item_id"] for i in select(pairs, 20, seed=1)}


def test_equal_rows_get_ids_of_their_own():
    ids = [item["item_id"] for item in select([({"n": 1}, {}), ({"n": 2}, {}), ({"n": 1}, {})], 0, seed=0)]
    assert len(set(ids)) == 3
    assert ids[2] == f"{ids[0]}-1"


def test_text_form_and_chat_form_name_an_item_alike(tmp_path):
    lines = [{"question": f"q{n}?", "choices": ["a", "b"], "answer": n % 2, "subject": "s"} for n in range(9)]
    url = write_rows(tmp_path / "mc.jsonl", lines)
    as_rows = asked(rows, url, limit=4)
    as_problems = asked(problems, url, limit=4, adapter="mmlu")
    assert as_rows["item_id"] == as_problems["item_id"]
    assert [q.splitlines()[0] for q in as_problems["question"]] == as_rows["question"]
    assert as_problems["letters"][0] == ["A", "B"]


def test_only_what_training_never_sees_is_asked(tmp_path):
    url = write_rows(tmp_path / "text.jsonl", [{"text": f"document number {n}"} for n in range(200)])
    found = asked(documents, url, held_out=0.2)["text"]
    source = SourceConfig(url=url, held_out=0.2)
    record_of = open_adapter(source.adapter, url, "document", {})
    expected = [
        f"document number {n}"
        for n in range(200)
        if held_out_score(record_of(n, {"text": f"document number {n}"}), "content") < 0.2
    ]
    assert found == expected
    assert 20 < len(found) < 60


def test_a_continuation_offers_the_true_phrase_and_those_of_three_other_documents(tmp_path):
    texts = [" ".join(f"w{n}.{k}" for k in range(60)) for n in range(8)]
    url = write_rows(tmp_path / "t.jsonl", [{"text": text} for text in [*texts, "too short"]])
    found = continuations(benchmark="c", source={"url": url}, limit=0, seed=0, mirror="")["test"]
    assert len(found) == 8
    for number, item in enumerate(found):
        words = texts[number].split()
        assert item["context"] == " ".join(words[:32])
        assert item["choices"][item["right"]] == " ".join(words[32:40])
        others = {choice.split(".")[0] for choice in item["choices"]}
        assert len(item["choices"]) == 4 == len(others)
    assert len(set(found["right"])) > 1


@pytest.mark.parametrize("reward", ["os:system", "remote:http://127.0.0.1:1", "judge:/etc/passwd"])
def test_data_may_not_name_code_or_an_address_as_the_reward_of_a_benchmark(tmp_path, reward):
    url = write_rows(tmp_path / "p.jsonl", [{"question": "1+1", "answer": "2", "reward": reward}])
    with pytest.raises(ConfigError, match=rf"asks for the reward {reward}, and data may only .*p\.jsonl \(its row 0"):
        asked(problems, url, adapter="problem")


@pytest.mark.parametrize(("read", "lines", "options", "said"), [
    (problems, [{"question": "1+1", "answer": "2"}], {"adapter": "problem", "held_out": 0.5}, "held_out_by"),
    (continuations, [{"text": "word " * 50}] * 3, {}, "has 3 held-out documents"),
    (documents, [{"text": "  "}], {}, "gave no items"),
])  # fmt: skip
def test_sources_without_items_to_ask_are_refused(tmp_path, read, lines, options, said):
    source = {"url": write_rows(tmp_path / "t.jsonl", lines)} | options
    with pytest.raises(SourceError, match=said):
        read(benchmark="b", source=source, limit=0, seed=0, mirror="")
