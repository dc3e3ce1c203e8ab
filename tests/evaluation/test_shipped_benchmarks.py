"""Three rows written by hand for each benchmark: asked as lm-eval's task file asks, and judged."""

import ast
import json
from pathlib import Path

import jinja2
import lm_eval
import pytest
import yaml

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.evaluation.benchmark import open_benchmark
from nanodag.evaluation.forms import shipped_forms
from nanodag.evaluation.harness import run_benchmark
from nanodag.evaluation.written import Answer
from tests.evaluation.test_harness import Scripted

TASKS = Path(lm_eval.__file__).parent / "tasks"


class InOrder(Scripted):
    """Gives its answers in the order of the prompts."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def generate_until(self, requests):
        self.asked = [request.args[0] for request in requests]
        return [Answer(text) for text in self.answers]


def humaneval(name, operator):
    prompt = f'def {name}(a: int, b: int) -> int:\n    """The result.\n    >>> {name}(1, 2)\n    """\n'
    check = f"def check(candidate):\n    for a in range(4):\n        assert candidate(a, 3) == a {operator} 3\n"
    test = f"\n\nMETADATA = {{}}\n\n\n{check}"
    solution = f"    return a {operator} b\n"
    return {"task_id": name, "prompt": prompt, "canonical_solution": solution, "test": test, "entry_point": name}


def mbpp(name, operator):
    tests = [f"assert {name}({a}, 2) == {eval(f'{a} {operator} 2')}" for a in (1, 5, 7)]
    code = f"def {name}(a, b):\r\n    return a {operator} b"
    text = f"Write a function to {name}."
    setup = {"test_setup_code": "", "challenge_test_list": []}
    return {"task_id": 1, "text": text, "code": code, "test_list": tests, **setup}


def gpqa(question):
    wrong = {f"Incorrect Answer {n}": f"{question} wrong  {n}" for n in (1, 2, 3)}
    return {"Question": question, "Correct Answer": f" {question} right\n", **wrong}


CODE_ROWS = ("add", "+"), ("take", "-"), ("times", "*")
IFEVAL = {"instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"]}
IFEVAL["kwargs"] = [{"num_words": None, "relation": None}, {"num_words": 3, "relation": "at least"}]
# name -> adapter, rows, lm-eval's file and its column or template, answers of a base model, answers of a chat model.
# The first answer is right, the second wrong, in the third no answer can be found (or it is wrong too, where all text
# is an answer). Few words, so that the answers of base models end where their stop strings would end them.
CASES = {
    "humaneval": (
        "humaneval",
        [humaneval(*row) for row in CODE_ROWS],
        "humaneval/humaneval.yaml",
        ["    return a + b\n", "    return a * b\n", "    return a *"],
        ["Here:\n```python\ndef add(a, b):\n    return a + b\n```", "```\n    return a + b\n```", "It takes b from a."],
    ),
    "mbpp": (
        "mbpp",
        [mbpp(*row) for row in CODE_ROWS],
        "mbpp/mbpp.yaml",
        ["def add(a, b):\n    return a + b\n", "def take(a, b): return 1\n", "def times("],
        ["```python\ndef add(a, b): return a + b\n```\nDone.", "def take(a, b): return 1", "a times b, of course."],
    ),
    "math500": (
        "math",
        [{"problem": f"Half of ${n}x$?", "solution": "", "answer": f"\\frac{{{n}x}}{{2}}"} for n in (3, 5, 7)],
        None,
        [" It is $\\boxed{1.5x}$.", " It is $\\boxed{5x}$.", " " + "long " * 200],
        ["So $\\boxed{\\frac32x}$", "So 5x", "One of $\\boxed{1}$ and $\\boxed{2}$"],
    ),
    "aime": (
        "aime",
        [{"ID": str(n), "Problem": f"What is {n} + 1?", "Solution": "", "Answer": n + 1} for n in (3, 5, 7)],
        "aime/aime24.yaml",
        [" 4", " \\boxed{5}", " " + "long " * 200],
        ["$\\boxed{4}$", "\\boxed{007}", "\\boxed{1} or \\boxed{8}"],
    ),
    "ifeval": (
        "ifeval",
        [{"key": n, "prompt": f"Write {n}.", **IFEVAL} for n in (1, 2, 3)],
        "ifeval/ifeval.yaml",
        ["Not one comma here.", "Here, one comma.", "Two words"],
        ["Not one comma here.", "Here, one comma.", "Two words"],
    ),
    "bbh": (
        "bbh",
        [{"input": i, "target": target} for i, target in (("not False is", "True"), ("1 + 1 =", "2"), ("(", ") ]"))],
        "bbh/zeroshot/boolean_expressions.yaml",
        [" True", " 3", " the answer is ) or the answer is ) ]"],
        ["Step by step. So the answer is **True**.", "The answer is 3.", "The answer is 1. The answer is 2."],
    ),
    "simpleqa": (
        "simpleqa",
        [{"problem": f"Who wrote {n}?", "answer": "Ada, the Countess"} for n in (1, 2, 3)],
        None,
        [" ada the countess", " Bo", " "],
        ["It was her. Answer: Ada, the Countess.", "It was Ada, the Countess, I think.", " "],
    ),
}  # fmt: skip


def source(folder, rows, adapter):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"url": f"file:{path}", "adapter": adapter}


class LmEvalYaml(yaml.SafeLoader):
    """Reads lm-eval's files without importing the functions that they name."""


LmEvalYaml.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def asked_by_lm_eval(file, row):
    form = yaml.load((TASKS / file).read_text(), LmEvalYaml)
    template = form["doc_to_text"]
    return (
        row[template]
        if template in row
        else jinja2.Environment(keep_trailing_newline=True).from_string(template).render(**row)
    )


@pytest.mark.parametrize("name", list(CASES))
def test_a_base_model_is_asked_as_in_lm_eval_and_judged(name, tmp_path):
    adapter, rows, file, answers, _ = CASES[name]
    model = InOrder(answers)
    config = BenchmarkConfig(name=name, source=source(tmp_path, rows, adapter))
    result = run_benchmark(model, config, chat=False, seed=0, mirror="", folder=tmp_path)
    assert [record["scores"]["exact_match"] for record in result.records] == [1.0, 0.0, 0.0]
    assert result.counts["unparsed"] == (0 if name == "ifeval" else 1)
    if file:
        assert model.asked == [asked_by_lm_eval(file, row) for row in rows]


@pytest.mark.parametrize("name", list(CASES))
def test_a_chat_models_answer_is_found_and_judged(name, tmp_path):
    adapter, rows, _, _, answers = CASES[name]
    benchmark = open_benchmark(BenchmarkConfig(name=name, source=source(tmp_path, rows, adapter)), seed=0)
    judged = [benchmark.judge(item, Answer(text)) for item, text in zip(benchmark.items, answers, strict=True)]
    assert [one.scores["exact_match"] for one in judged] == [1.0, 0.0, 0.0]
    assert [bool(one.parsed) for one in judged] == [True, True, name == "ifeval"]


def test_math500_is_asked_as_lm_eval_asks_minerva_math(tmp_path):
    tree = ast.parse((TASKS / "minerva_math/utils.py").read_text())  # not imported: it wants packages of its own
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "doc_to_text")
    space = {}
    exec(ast.unparse(function), space)
    _, rows, _, answers, _ = CASES["math500"]
    model = InOrder(answers)
    config = BenchmarkConfig(name="math500", source=source(tmp_path, rows, "math"))
    run_benchmark(model, config, chat=False, seed=0, mirror="", folder=tmp_path)
    assert model.asked == [space["doc_to_text"](row) for row in rows]


def test_gpqas_likelihoods_are_asked_as_in_lm_eval_with_choices_in_a_fixed_order(tmp_path):
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
    template = yaml.load((TASKS / "gpqa/zeroshot/_gpqa_zeroshot_yaml").read_text(), LmEvalYaml)["doc_to_text"]
    for number, row in enumerate(rows):
        prompt, letter = asked[0][4 * number]
        listed = [line[4:] for line in prompt.splitlines() if line.startswith("(")]
        assert sorted(listed) == sorted(
            [f"{row['Question']} right", *(f"{row['Question']} wrong {n}" for n in (1, 2, 3))]
        )
        choices = {f"choice{n}": choice for n, choice in enumerate(listed, start=1)}
        assert prompt == jinja2.Template(template).render(Question=row["Question"], **choices)
        assert letter == " (A)"
        assert result.records[number]["scores"]["acc"] == float(listed[0].endswith("right"))


def test_every_shipped_form_of_this_kind_has_rows_here():
    elsewhere = {
        "arc",
        "arc_challenge",
        "arc_easy",
        "bits_per_byte",
        "continuation",
        "gsm8k",
        "mmlu",
        "multiple_choice",
        "verifiers",
    }
    assert set(shipped_forms()) - elsewhere - {"piqa", "problems", "winogrande", "gpqa"} == set(CASES)


def test_a_code_benchmark_says_why_a_program_failed(tmp_path):
    adapter, rows, _, _, answers = CASES["humaneval"]
    benchmark = open_benchmark(BenchmarkConfig(name="humaneval", source=source(tmp_path, rows, adapter)), seed=0)
    said = [benchmark.judge(item, Answer(t)).details for item, t in zip(benchmark.items, answers, strict=True)]
    assert [one["verdict"] for one in said] == ["passed", "failed", "failed"]
    assert [one["error"] for one in said] == [
        "", "AssertionError: assert candidate(a, 3) == a - 3", "the answer has no program",
    ]  # fmt: skip
    assert said[0]["program"].endswith("def add(a, b):\n    return a + b\n")


def test_an_item_whose_tests_cannot_be_judged_is_wrong_and_ends_no_evaluation(tmp_path, caplog):
    adapter, rows, _, _, answers = CASES["humaneval"]
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
