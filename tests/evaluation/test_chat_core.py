"""ChatCORE against nanochat's formula, worked out by hand."""

import json

import pytest

from nanodag.evaluation.core import CHAT_TASKS, chat_core_of
from nanodag.evaluation.paired import paired

RIGHT = {
    "arc_easy_chat": [1, 1, 0, 0], "arc_challenge_chat": [1, 0, 0, 0], "mmlu": [0, 0], "gsm8k": [1, 0, 0, 0, 0],
    "humaneval": [1, 1], "spelling_bee": [0, 1, 1, 1],
}  # fmt: skip
# (0.5 - 0.25) / 0.75, (0.25 - 0.25) / 0.75, (0 - 0.25) / 0.75, 0.2, 1, 0.75, and their mean
EXPECTED = (1 / 3 + 0 - 1 / 3 + 0.2 + 1 + 0.75) / 6


def results_of(folder, right=RIGHT):
    folder.mkdir(exist_ok=True)
    results = {}
    for name, scores in right.items():
        records = [{"id": f"i{n}", "scores": {"score": float(s)}} for n, s in enumerate(scores)]
        records[0] |= {"unparsed": 1, "output": "a line\u2028of a model\x85"}
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]  # as an eval stage does
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        results[name] = {"chat": True, "metric": "score", "value": sum(scores) / len(scores), "stderr": 0.1}
    return results


def test_it_is_the_mean_of_the_tasks_each_centred_by_chance(tmp_path):
    result = chat_core_of(results_of(tmp_path), tmp_path)
    score = result.scores["chat_core"]
    assert score.value == pytest.approx(EXPECTED)
    assert score.stderr == pytest.approx((3 * (0.1 / 0.75) ** 2 + 3 * 0.1**2) ** 0.5 / 6)
    assert score.num_items == 21 and result.counts["unparsed"] == 6


def test_its_records_compare_two_models_item_by_item(tmp_path):
    first = chat_core_of(results_of(tmp_path / "a"), tmp_path / "a")
    better = {**RIGHT, "gsm8k": [1, 1, 0, 0, 0], "mmlu": [1, 0]}
    second = chat_core_of(results_of(tmp_path / "b", better), tmp_path / "b")
    found = paired(first.records, second.records, "chat_core")
    assert found.difference == pytest.approx((0.2 + 0.5 / 0.75) / 6)
    assert found.value_a == pytest.approx(EXPECTED)


@pytest.mark.parametrize("name", list(CHAT_TASKS))
def test_without_a_task_or_with_one_that_was_no_chat_there_is_none(tmp_path, name):
    results = results_of(tmp_path)
    assert chat_core_of({other: result for other, result in results.items() if other != name}, tmp_path) is None
    results[name]["chat"] = False
    assert chat_core_of(results, tmp_path) is None
