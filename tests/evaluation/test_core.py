import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.data.core_tasks import TASKS, Task, centred, find_files, prompts_of, read_items
from nanodag.errors import SourceError
from nanodag.evaluation.core import CHAT_TASKS, chat_core_of, run_core, score_task
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.evaluation.paired import paired
from nanodag.model.core_scoring import JudgedItem
from tests.core_bundle import CHOICE, ROWS, SCHEMA, TEXT, write_bundle
from tests.data.rows import write_rows
from tests.evaluation.tiny import asked_by


def task(kind, num_fewshot=0, delimiter=" ") -> Task:
    return Task("t", "t", kind, num_fewshot, delimiter, 0.25, 6, 100)


def test_there_are_22_tasks_with_the_shots_of_the_paper():
    assert len(TASKS) == 22 == len({task.label for task in TASKS})
    assert {t.num_fewshot for t in TASKS} == {0, 3, 10}


def test_prompts_with_a_worked_example():
    # of six items but the first, nanochat draws with Random(1234 + 0)
    (drawn,) = random.Random(1234).sample([1, 2, 3, 4, 5], 1)
    example = CHOICE[drawn]
    shown = f"{example['query']}\nAnswer: {example['choices'][example['gold']]}\n\n"
    found = prompts_of(task("multiple_choice", 1, "\nAnswer: "), CHOICE, 0)
    assert found == [f"{shown}the a\nAnswer: {choice}" for choice in ("sat on the mat", "ran", "and after")]
    example = SCHEMA[drawn]
    shown = f"{example['context_options'][example['gold']]} sat on it\n\n"
    assert prompts_of(task("schema", 1), SCHEMA, 0) == [f"{shown}the a cat sat on it", f"{shown}a a dog sat on it"]
    shown = f"the cat {'abcdef'[drawn]} sat on\n\n"
    assert prompts_of(task("language_modeling", 1), TEXT, 0) == [f"{shown}the cat a", f"{shown}the cat a sat on"]


def test_items_are_shuffled_before_the_limit(tmp_path):
    write_rows(path := tmp_path / "t.jsonl", [{"n": n} for n in range(50)])
    order = list(range(50))
    random.Random(1337).shuffle(order)
    assert [item["n"] for item in read_items(path, 7)] == order[:7]


@pytest.fixture
def checkpoint(model_folder) -> EvaluatedModel:
    return EvaluatedModel(model_folder, asked_by(micro_batch_tokens=200, max_new_tokens=4))


@torch.no_grad()
def mean_loss(model, tokens, start, end):
    logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return -sum(logprobs[i - 1, tokens[i]].item() for i in range(start, end)) / (end - start)


@pytest.mark.parametrize("max_positions", [192, 9])
def test_answers_are_judged_by_mean_loss_where_they_differ(checkpoint, model_folder, max_positions):
    checkpoint.max_positions = max_positions  # of 9, prompts lose their beginnings, each as much as it must
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    for kind in ("multiple_choice", "schema"):
        expected = []
        for number, item in enumerate(ROWS[kind]):
            tokens = [checkpoint.tok_encode(prompt) for prompt in prompts_of(task(kind, 2), ROWS[kind], number)]
            oriented = tokens if kind == "multiple_choice" else [ids[::-1] for ids in tokens]
            shared = next(i for i in range(99) if len({ids[i] for ids in oriented}) > 1)
            losses = []
            for ids in tokens:
                cut = max(0, len(ids) - max_positions)
                start = (shared if kind == "multiple_choice" else len(ids) - shared) - cut
                losses.append(mean_loss(model, ids[cut:], start, len(ids) - cut))
            expected.append(losses.index(min(losses)) == item["gold"])
        judged = score_task(checkpoint, task(kind, 2), ROWS[kind])
        assert [one.is_right for one in judged] == expected
        assert all(one.is_too_long == (max_positions == 9) for one in judged)
        assert len(set(expected)) == 2


def test_a_continuation_is_right_when_every_token_is_the_likeliest(checkpoint, model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    items = []
    for word in "abcdefghijklmnopqrstuvwxyz":
        ids = checkpoint.tok_encode(f"the cat {word}")
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        text = checkpoint.tokenizer.decode(ids[1:])
        if checkpoint.tok_encode(text) == ids:  # some texts are read as other tokens than they were written with
            items.append({"context": f"the cat {word}", "continuation": text.removeprefix(f"the cat {word}")})
    wrong = [{**item, "continuation": item["continuation"] + " mat"} for item in items]
    assert items
    judged = score_task(checkpoint, task("language_modeling", 0, ""), items + wrong)
    assert [one.is_right for one in judged] == [True] * len(items) + [False] * len(wrong)


def test_an_item_whose_answer_alone_has_no_room_is_wrong_and_counted(checkpoint):
    checkpoint.max_positions = 6
    long = {"query": "the a", "choices": ["ran", "sat on the mat and the dog ran after the cat"], "gold": 0}
    short = {"query": "the a", "choices": ["ran", "sat"], "gold": 0}
    judged = score_task(checkpoint, task("multiple_choice"), [long, short])
    assert judged[0] == JudgedItem(is_right=False, is_too_long=True)


def test_a_choice_that_another_one_begins_with_is_judged_by_its_last_token(checkpoint, model_folder):
    items = [{"query": "the a", "choices": ["ran", "ran to the dog"], "gold": gold} for gold in (0, 1)]
    first, second = score_task(checkpoint, task("multiple_choice"), items)
    assert first.is_right != second.is_right and not first.is_too_long


def test_core_is_the_mean_of_centred_accuracies(tmp_path, checkpoint):
    bundle = write_bundle(tmp_path)
    config = BenchmarkConfig(name="core", source=f"file:{bundle}/*/*.jsonl", limit=11)
    result = run_core(checkpoint, config)
    by_task = {t.label: [r["scores"][t.label] for r in result.records if t.label in r["scores"]] for t in TASKS}
    assert all(len(found) == 11 for found in by_task.values())
    expected = sum((sum(by_task[t.label]) / 11 - t.baseline) / (1 - t.baseline) for t in TASKS) / 22
    assert result.scores["core"].value == pytest.approx(expected)
    # what paired comparison will see: items weighed so that their mean is CORE
    weight = sum(record["weight"] for record in result.records)
    assert sum(r["weight"] * r["scores"]["core"] for r in result.records) / weight == pytest.approx(expected)
    assert 0 < result.scores["core"].stderr < 0.1
    assert (centred(0.25, 0.25), centred(1.0, 0.62), centred(0.5, 0.0)) == (0.0, 1.0, 0.5)


def test_a_task_that_is_missing_or_there_twice_is_named(tmp_path):
    bundle = write_bundle(tmp_path)
    squad = next(bundle.rglob("squad.jsonl"))
    (bundle / "copy.squad.jsonl").write_bytes(squad.read_bytes())  # no task's name
    (bundle / "squad.jsonl.gz").write_bytes(b"")
    with pytest.raises(SourceError, match=r"CORE's squad is there twice: .*squad\.jsonl.* and "):
        find_files(f"file:{bundle}/*/*.jsonl")
    (bundle / "squad.jsonl.gz").unlink()
    squad.unlink()
    with pytest.raises(SourceError, match=r"lacks squad\.jsonl"):
        find_files(f"file:{bundle}/*/*.jsonl")


# ChatCORE by nanochat's formula, worked out by hand
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


def test_chat_core_is_the_mean_of_the_tasks_each_centred_by_chance(tmp_path):
    result = chat_core_of(results_of(tmp_path), tmp_path)
    score = result.scores["chat_core"]
    assert score.value == pytest.approx(EXPECTED)
    assert score.stderr == pytest.approx((3 * (0.1 / 0.75) ** 2 + 3 * 0.1**2) ** 0.5 / 6)
    assert score.num_items == 21 and result.counts["unparsed"] == 6


def test_records_of_chat_core_compare_two_models_item_by_item(tmp_path):
    first = chat_core_of(results_of(tmp_path / "a"), tmp_path / "a")
    better = {**RIGHT, "gsm8k": [1, 1, 0, 0, 0], "mmlu": [1, 0]}
    second = chat_core_of(results_of(tmp_path / "b", better), tmp_path / "b")
    found = paired(first.records, second.records, "chat_core")
    assert found.difference == pytest.approx((0.2 + 0.5 / 0.75) / 6)
    assert found.value_a == pytest.approx(EXPECTED)


@pytest.mark.parametrize("name", list(CHAT_TASKS))
def test_without_a_task_or_with_one_that_was_no_chat_there_is_no_chat_core(tmp_path, name):
    results = results_of(tmp_path)
    assert chat_core_of({other: result for other, result in results.items() if other != name}, tmp_path) is None
    results[name]["chat"] = False
    assert chat_core_of(results, tmp_path) is None
