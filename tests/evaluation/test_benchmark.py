import json
import subprocess
import sys

import pytest

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.errors import ConfigError
from nanodag.evaluation.benchmark import open_benchmark
from nanodag.evaluation.forms import form_files
from nanodag.evaluation.harness import run_benchmark
from nanodag.evaluation.results import Answer
from nanodag.store.kept_lines import KeptLines
from tests.data.rows import GSM8K, write_rows
from tests.evaluation.scripted import Scripted


class Varied(Scripted):
    """Answers by the number of the request, and keeps messages and answers."""

    def generate_until(self, requests):
        self.said = [
            Answer(f"{number} so #### {number % 3} \\boxed{{{number % 2}}}", ending=("stop", "length")[number % 2])
            for number in range(len(requests))
        ]
        self.params = [request.args[1] for request in requests]
        return self.said

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return json.dumps(chat_history)


@pytest.fixture
def source(tmp_path):
    rows = [
        {**row, "problem": row["question"], "solution": f"{number % 2}", "instruction": f"I{number}"}
        for number, row in enumerate(GSM8K)
    ]
    return write_rows(tmp_path / "rows.jsonl", rows)


FORMS = {
    "gsm8k": {},
    "problems": {
        "form": "problems",
        "source": {
            "adapter": "problem", "columns": {"question": "problem", "answer": "solution"}, "reward": "boxed_math",
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"num_samples": 3, "temperature": 1.0, "metrics": ["pass@2"]}])
@pytest.mark.parametrize("name", list(FORMS))
def test_items_prompts_and_scores_are_those_of_lm_eval(source, tmp_path, name, more):
    given = {**FORMS[name], **more, "name": name, "limit": 3, "system": "Be brief.", "num_fewshot": 2}
    given |= {side: {"url": source, **FORMS[name].get("source", {})} for side in ("source", "fewshot")}
    config = BenchmarkConfig(**given)
    model = Varied()
    theirs = run_benchmark(model, config, chat=True, seed=4, mirror="", folder=tmp_path)
    benchmark = open_benchmark(config, seed=4)
    number = config.num_samples
    answers = {item.id: model.said[i * number : (i + 1) * number] for i, item in enumerate(benchmark.items)}
    ours = benchmark.result(answers)
    assert [json.dumps(item.messages) for item in benchmark.items] == [record["prompt"] for record in theirs.records]
    assert [len(item.messages) for item in benchmark.items] == [6] * 3
    for mine, other in zip(ours.records, theirs.records, strict=True):
        assert {**mine, "prompt": ""} == {**other, "prompt": ""}
    assert ours.as_json() == theirs.as_json()
    assert ours.counts["truncated"] == 3 * number // 2


def test_how_a_sample_is_drawn_follows_from_seed_item_and_number(source):
    config = BenchmarkConfig(name="gsm8k", source=source, num_samples=2, temperature=0.7, top_k=5, stop=["END"])
    first, second = open_benchmark(config, seed=1), open_benchmark(config, seed=1)
    drawn = [first.params(item, n, max_new_tokens=9, stop_token_ids=(3,)) for item in first.items for n in range(2)]
    assert len({one.sampling_seed for one in drawn}) == 10
    assert drawn[3] == second.params(second.items[1], 1, max_new_tokens=9, stop_token_ids=(3,))
    assert (drawn[0].temperature, drawn[0].top_k, drawn[0].stop, drawn[0].max_new_tokens) == (0.7, 5, ("END",), 9)
    own = config.model_copy(update={"seed": 1, "max_new_tokens": 4})
    other = open_benchmark(own, seed=8).params(first.items[0], 0, max_new_tokens=9)
    assert (other.sampling_seed, other.max_new_tokens) == (drawn[0].sampling_seed, 4)
    greedy = open_benchmark(BenchmarkConfig(name="gsm8k", source=source), seed=1)
    assert greedy.params(greedy.items[0], 0, max_new_tokens=9).sampling_seed is None


@pytest.mark.parametrize(("given", "why"), [
    ({"name": "arc_easy"}, "is scored by likelihood"),
    ({"name": "g", "form": "lm_eval:gsm8k/gsm8k.yaml"}, "has no chat form"),
])  # fmt: skip
def test_what_needs_lm_eval_itself_is_refused_by_name(source, given, why):
    with pytest.raises(ConfigError, match=rf"{why}.*; only an eval stage without a `judge` can ask it"):
        open_benchmark(BenchmarkConfig(source=source, **given), seed=0)


def test_another_number_of_answers_than_samples_is_refused(source):
    benchmark = open_benchmark(BenchmarkConfig(name="gsm8k", source=source, limit=2), seed=0)
    with pytest.raises(ValueError, match="has 2 answers, not 1"):
        benchmark.result({item.id: [Answer("#### 24")] * 2 for item in benchmark.items})


def test_a_benchmark_is_opened_and_scored_without_torch_and_lm_eval(source):
    script = f"""
import sys
from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.evaluation.benchmark import open_benchmark
benchmark = open_benchmark(BenchmarkConfig(name="gsm8k", source={source!r}), seed=0)
result = benchmark.result({{item.id: [benchmark.answer("#### 24", ending="stop")] for item in benchmark.items}})
print(result.scores["exact_match"].value, sorted({{"torch", "lm_eval", "transformers"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "0.2 []\n"


JUDGE = 'def judge(doc, results):\n    return {"right": float(results[0].startswith("0")), "parsed": results[0]}\n'
OWN_FORM = """
include: [shared.yaml]
custom_dataset: !function nanodag.evaluation.items.rows
output_type: generate_until
doc_to_target: answer
process_results: !function deep.judge.judge
metric_list: [{metric: right, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def own_form(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "judge.py").write_text(JUDGE)
    (tmp_path / "shared.yaml").write_text('doc_to_text: "{{question}}"\ndoc_to_target: none')
    (tmp_path / "mine.yaml").write_text("include: mine_chat.yaml")
    (tmp_path / "mine_chat.yaml").write_text(OWN_FORM)
    return tmp_path


def test_a_function_beside_a_form_is_found_as_lm_eval_finds_it(own_form, source):
    config = BenchmarkConfig(name="mine", form=str(own_form / "mine.yaml"), source=source, limit=2)
    model = Varied()
    theirs = run_benchmark(model, config, chat=True, seed=4, mirror="", folder=own_form)
    benchmark = open_benchmark(config, seed=4)
    ours = benchmark.result({item.id: [said] for item, said in zip(benchmark.items, model.said, strict=True)})
    assert ours.scores["right"].value == theirs.scores["right"].value == 0.5


@pytest.mark.parametrize(
    ("returned", "why"),
    [("{'right': float('nan')}", "which is no JSON"), ("{'right': 1.0, 'details': object()}", "which is no JSON")],
)
def test_what_no_record_can_hold_is_refused_where_it_is_returned(own_form, source, returned, why):
    (own_form / "deep" / "judge.py").write_text(f"def judge(doc, results):\n    return {returned}\n")
    benchmark = open_benchmark(BenchmarkConfig(name="mine", form=str(own_form / "mine.yaml"), source=source), seed=4)
    with pytest.raises(ConfigError, match=why):
        benchmark.judge(benchmark.items[0], Answer("8"))


def test_numbers_of_numpy_are_scores(own_form, source):
    (own_form / "deep" / "judge.py").write_text(
        "import numpy\n\n\ndef judge(doc, results):\n"
        "    return {'right': numpy.bool_(True), 'details': {'n': numpy.int64(3)}}\n"
    )
    config = BenchmarkConfig(name="mine", form=str(own_form / "mine.yaml"), source=source, limit=2)
    model = Varied()
    with KeptLines(own_form / "kept") as model.kept:
        result = run_benchmark(model, config, chat=True, seed=4, mirror="", folder=own_form)
    assert (result.scores["right"].value, result.records[0]["details"]) == (1.0, {"n": 3})


def test_the_files_that_say_how_a_benchmark_is_scored_are_known(own_form, source):
    config = BenchmarkConfig(name="mine", form=str(own_form / "mine.yaml"), source=source)
    names = [str(file.relative_to(own_form)) for file in form_files(config)]
    assert names == ["mine.yaml", "mine_chat.yaml", "deep/judge.py", "shared.yaml"]
    assert form_files(BenchmarkConfig(name="gsm8k", source=source)) == []
