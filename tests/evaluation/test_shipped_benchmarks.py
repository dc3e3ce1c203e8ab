"""Three rows written by hand for each benchmark, asked and judged."""

import pytest

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.evaluation.benchmark import open_benchmark
from nanodag.evaluation.forms import shipped_forms
from nanodag.evaluation.harness import run_benchmark
from nanodag.evaluation.results import Answer
from tests.data.rows import IFEVAL, gpqa, humaneval, mbpp, write_rows
from tests.evaluation.scripted import Scripted

CODE_ROWS = ("add", "+"), ("take", "-"), ("times", "*")
# name -> rows, answers of a chat model: the first is right, the second wrong, in the third no answer can be
# found (or it is wrong too, where all text is an answer).
CASES = {
    "humaneval": (
        [humaneval(*row) for row in CODE_ROWS],
        ["Here:\n```python\ndef add(a, b):\n    return a + b\n```", "```\n    return a + b\n```", "It takes b from a."],
    ),
    "mbpp": (
        [mbpp(*row) for row in CODE_ROWS],
        ["```python\ndef add(a, b): return a + b\n```\nDone.", "def take(a, b): return 1", "a times b, of course."],
    ),
    "math500": (
        [{"problem": f"Half of ${n}x$?", "solution": "", "answer": f"\\frac{{{n}x}}{{2}}"} for n in (3, 5, 7)],
        ["So $\\boxed{\\frac32x}$", "So 5x", "One of $\\boxed{1}$ and $\\boxed{2}$"],
    ),
    "aime": (
        [{"ID": str(n), "Problem": f"What is {n} + 1?", "Solution": "", "Answer": n + 1} for n in (3, 5, 7)],
        ["$\\boxed{4}$", "\\boxed{007}", "\\boxed{1} or \\boxed{8}"],
    ),
    "ifeval": (
        [{"key": n, "prompt": f"Write {n}.", **IFEVAL} for n in (1, 2, 3)],
        ["Not one comma here.", "Here, one comma.", "Two words"],
    ),
    "bbh": (
        [{"input": i, "target": target} for i, target in (("not False is", "True"), ("1 + 1 =", "2"), ("(", ") ]"))],
        ["Step by step. So the answer is **True**.", "The answer is 3.", "The answer is 1. The answer is 2."],
    ),
    "simpleqa": (
        [{"problem": f"Who wrote {n}?", "answer": "Ada, the Countess"} for n in (1, 2, 3)],
        ["It was her. Answer: Ada, the Countess.", "It was Ada, the Countess, I think.", " "],
    ),
}


def config_of(name, folder, rows):
    url = write_rows(folder / "rows.jsonl", rows)
    return BenchmarkConfig(name=name, source={"url": url, "adapter": name.removesuffix("500")})


def opened(name, folder):
    rows, answers = CASES[name]
    return open_benchmark(config_of(name, folder, rows), seed=0), answers


def test_a_base_models_answer_to_the_one_that_lm_eval_does_not_have_is_judged(tmp_path):
    """The others are held against lm-eval's own files (test_as_in_lm_eval.py)."""
    model = Scripted({"1?": " ada the countess", "2?": " Bo", "3?": " "})
    config = config_of("simpleqa", tmp_path, CASES["simpleqa"][0])
    result = run_benchmark(model, config, chat=False, seed=0, mirror="", folder=tmp_path)
    assert [record["scores"]["exact_match"] for record in result.records] == [1.0, 0.0, 0.0]
    assert result.counts["unparsed"] == 1


@pytest.mark.parametrize("name", list(CASES))
def test_a_chat_models_answer_is_found_and_judged(name, tmp_path):
    benchmark, answers = opened(name, tmp_path)
    judged = [benchmark.judge(item, Answer(text)) for item, text in zip(benchmark.items, answers, strict=True)]
    assert [one.scores["exact_match"] for one in judged] == [1.0, 0.0, 0.0]
    assert [bool(one.parsed) for one in judged] == [True, True, name == "ifeval"]


def test_gpqas_choices_are_asked_in_a_fixed_order(tmp_path):
    rows = [gpqa(question) for question in ("Where", "Who", "Why")]
    config = config_of("gpqa", tmp_path, rows)

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
        assert sorted(listed) == [f"{row['Question']} {word}" for word in ("right", "wrong 1", "wrong 2", "wrong 3")]
        assert letter == " (A)"
        assert result.records[number]["scores"]["acc"] == float(listed[0].endswith("right"))


def test_every_shipped_form_of_this_kind_has_rows_here():
    likelihoods = {"arc", "arc_challenge", "arc_easy", "bits_per_byte", "continuation", "gpqa", "mmlu", "piqa"}
    elsewhere = {"gsm8k", "multiple_choice", "problems", "verifiers", "winogrande"}
    assert set(shipped_forms()) - likelihoods - elsewhere == set(CASES)


def test_a_code_benchmark_says_why_a_program_failed(tmp_path):
    benchmark, answers = opened("humaneval", tmp_path)
    said = [benchmark.judge(item, Answer(t)).details for item, t in zip(benchmark.items, answers, strict=True)]
    assert [one["verdict"] for one in said] == ["passed", "failed", "failed"]
    errors = ["", "AssertionError: assert candidate(a, 3) == a - 3", "the answer has no program"]
    assert [one["error"] for one in said] == errors
    assert said[0]["program"].endswith("def add(a, b):\n    return a + b\n")


def test_an_item_whose_tests_cannot_be_judged_is_wrong_and_ends_no_evaluation(tmp_path, caplog):
    rows, answers = CASES["humaneval"]
    own = "class Own: pass\ndef check(candidate):\n    assert candidate(Own(), 2) == 3\n"
    config = config_of("humaneval", tmp_path, [{**row, "test": own} for row in rows])
    benchmark = open_benchmark(config, seed=0)
    judged = benchmark.judge(benchmark.items[0], Answer(answers[0]))
    assert judged.scores == {"exact_match": 0.0} and judged.details["verdict"] == "failed"
    assert "neither a plain value nor a function" in judged.details["error"] and "Counted as wrong" in caplog.text


def test_an_answer_that_follows_all_instructions_but_for_its_first_line_is_loosely_right(tmp_path):
    benchmark, _ = opened("ifeval", tmp_path)
    scores = benchmark.judge(benchmark.items[0], Answer("Sure, here it is:\nthree words follow")).scores
    assert scores == {"exact_match": 0.0, "loose": 1.0, "instructions": 0.5}
