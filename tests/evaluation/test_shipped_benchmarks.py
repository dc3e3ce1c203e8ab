"""Three rows written by hand for each benchmark, asked and judged."""

import pytest

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.evaluation.benchmark import open_benchmark
from nanodag.evaluation.forms import shipped_forms
from nanodag.evaluation.harness import run_benchmark
from nanodag.evaluation.results import Answer
from tests.data.rows import IFEVAL, gpqa, humaneval, mbpp, write_rows
from tests.evaluation.scripted import Scripted


class InOrder(Scripted):
    """Gives its answers in the order of the prompts."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def generate_until(self, requests):
        self.asked = [request.args[0] for request in requests]
        return [Answer(text) for text in self.answers]


CODE_ROWS = ("add", "+"), ("take", "-"), ("times", "*")
# name -> adapter, rows, answers of a base model, answers of a chat model.
# The first answer is right, the second wrong, in the third no answer can be found (or it is wrong too, where all text
# is an answer). Few words, so that the answers of base models end where their stop strings would end them.
CASES = {
    "humaneval": (
        "humaneval",
        [humaneval(*row) for row in CODE_ROWS],
        ["    return a + b\n", "    return a * b\n", "    return a *"],
        ["Here:\n```python\ndef add(a, b):\n    return a + b\n```", "```\n    return a + b\n```", "It takes b from a."],
    ),
    "mbpp": (
        "mbpp",
        [mbpp(*row) for row in CODE_ROWS],
        ["def add(a, b):\n    return a + b\n", "def take(a, b): return 1\n", "def times("],
        ["```python\ndef add(a, b): return a + b\n```\nDone.", "def take(a, b): return 1", "a times b, of course."],
    ),
    "math500": (
        "math",
        [{"problem": f"Half of ${n}x$?", "solution": "", "answer": f"\\frac{{{n}x}}{{2}}"} for n in (3, 5, 7)],
        [" It is $\\boxed{1.5x}$.", " It is $\\boxed{5x}$.", " " + "long " * 200],
        ["So $\\boxed{\\frac32x}$", "So 5x", "One of $\\boxed{1}$ and $\\boxed{2}$"],
    ),
    "aime": (
        "aime",
        [{"ID": str(n), "Problem": f"What is {n} + 1?", "Solution": "", "Answer": n + 1} for n in (3, 5, 7)],
        [" 4", " \\boxed{5}", " " + "long " * 200],
        ["$\\boxed{4}$", "\\boxed{007}", "\\boxed{1} or \\boxed{8}"],
    ),
    "ifeval": (
        "ifeval",
        [{"key": n, "prompt": f"Write {n}.", **IFEVAL} for n in (1, 2, 3)],
        ["Not one comma here.", "Here, one comma.", "Two words"],
        ["Not one comma here.", "Here, one comma.", "Two words"],
    ),
    "bbh": (
        "bbh",
        [{"input": i, "target": target} for i, target in (("not False is", "True"), ("1 + 1 =", "2"), ("(", ") ]"))],
        [" True", " 3", " the answer is ) or the answer is ) ]"],
        ["Step by step. So the answer is **True**.", "The answer is 3.", "The answer is 1. The answer is 2."],
    ),
    "simpleqa": (
        "simpleqa",
        [{"problem": f"Who wrote {n}?", "answer": "Ada, the Countess"} for n in (1, 2, 3)],
        [" ada the countess", " Bo", " "],
        ["It was her. Answer: Ada, the Countess.", "It was Ada, the Countess, I think.", " "],
    ),
}  # fmt: skip


def source(folder, rows, adapter):
    return {"url": write_rows(folder / "rows.jsonl", rows), "adapter": adapter}


@pytest.mark.parametrize("name", list(CASES))
def test_a_base_models_answer_is_judged(name, tmp_path):
    adapter, rows, answers, _ = CASES[name]
    model = InOrder(answers)
    config = BenchmarkConfig(name=name, source=source(tmp_path, rows, adapter))
    result = run_benchmark(model, config, chat=False, seed=0, mirror="", folder=tmp_path)
    assert [record["scores"]["exact_match"] for record in result.records] == [1.0, 0.0, 0.0]
    assert result.counts["unparsed"] == (0 if name == "ifeval" else 1)


@pytest.mark.parametrize("name", list(CASES))
def test_a_chat_models_answer_is_found_and_judged(name, tmp_path):
    adapter, rows, _, answers = CASES[name]
    benchmark = open_benchmark(BenchmarkConfig(name=name, source=source(tmp_path, rows, adapter)), seed=0)
    judged = [benchmark.judge(item, Answer(text)) for item, text in zip(benchmark.items, answers, strict=True)]
    assert [one.scores["exact_match"] for one in judged] == [1.0, 0.0, 0.0]
    assert [bool(one.parsed) for one in judged] == [True, True, name == "ifeval"]


def test_gpqas_choices_are_asked_in_a_fixed_order(tmp_path):
    rows = [gpqa(question) for question in ("Where", "Who", "Why")]
    config = BenchmarkConfig(name="gpqa", source=source(tmp_path, rows, "gpqa"))

    class Sure(Scripted):
        def loglikelihood(self, requests):
            self.asked += [request.args for request in requests]
            return [(0.0 if "(A)" in request.args[1] else -1.0, False) for request in requests]

    asked = []
    for _ in range(2):
        model = Sure()
        result = run_benchmark(model, config, chat=False, seed=0, mirror="", folder=tmp_path)
        asked.append(model.asked)
    assert asked[0] == asked[1]
    for number, row in enumerate(rows):
        prompt, letter = asked[0][4 * number]
        listed = [line[4:] for line in prompt.splitlines() if line.startswith("(")]
        assert sorted(listed) == sorted(
            [f"{row['Question']} right", *(f"{row['Question']} wrong {n}" for n in (1, 2, 3))]
        )
        assert letter == " (A)"
        assert result.records[number]["scores"]["acc"] == float(listed[0].endswith("right"))


def test_every_shipped_form_of_this_kind_has_rows_here():
    likelihoods = {"arc", "arc_challenge", "arc_easy", "bits_per_byte", "continuation", "gpqa", "mmlu", "piqa"}
    elsewhere = {"gsm8k", "multiple_choice", "problems", "verifiers", "winogrande"}
    assert set(shipped_forms()) - likelihoods - elsewhere == set(CASES)


def test_a_code_benchmark_says_why_a_program_failed(tmp_path):
    adapter, rows, _, answers = CASES["humaneval"]
    benchmark = open_benchmark(BenchmarkConfig(name="humaneval", source=source(tmp_path, rows, adapter)), seed=0)
    said = [benchmark.judge(item, Answer(t)).details for item, t in zip(benchmark.items, answers, strict=True)]
    assert [one["verdict"] for one in said] == ["passed", "failed", "failed"]
    assert [one["error"] for one in said] == [
        "", "AssertionError: assert candidate(a, 3) == a - 3", "the answer has no program",
    ]  # fmt: skip
    assert said[0]["program"].endswith("def add(a, b):\n    return a + b\n")


def test_an_item_whose_tests_cannot_be_judged_is_wrong_and_ends_no_evaluation(tmp_path, caplog):
    adapter, rows, _, answers = CASES["humaneval"]
    own = "class Own: pass\ndef check(candidate):\n    assert candidate(Own(), 2) == 3\n"
    asked = source(tmp_path, [{**row, "test": own} for row in rows], adapter)
    benchmark = open_benchmark(BenchmarkConfig(name="humaneval", source=asked), seed=0)
    judged = benchmark.judge(benchmark.items[0], Answer(answers[0]))
    assert judged.scores == {"exact_match": 0.0} and judged.details["verdict"] == "failed"
    assert "neither a plain value nor a function" in judged.details["error"] and "Counted as wrong" in caplog.text


def test_an_answer_that_follows_all_instructions_but_for_its_first_line_is_loosely_right(tmp_path):
    adapter, rows, *_ = CASES["ifeval"]
    benchmark = open_benchmark(BenchmarkConfig(name="ifeval", source=source(tmp_path, rows, adapter)), seed=0)
    scores = benchmark.judge(benchmark.items[0], Answer("Sure, here it is:\nthree words follow")).scores
    assert scores == {"exact_match": 0.0, "loose": 1.0, "instructions": 0.5}
