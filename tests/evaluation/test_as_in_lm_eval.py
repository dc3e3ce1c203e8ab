"""Each shipped benchmark that lm-eval has too, beside lm-eval's own task file: on the same rows the same prompts and
stop strings, and for the same answers the same scores. `differs` has the answers that are judged otherwise on purpose,
with our score; docs/reference/evaluation.md says why."""

import hashlib
import importlib.metadata
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import evaluate as metrics_of_hugging_face
import jinja2
import lm_eval
import nltk
import pytest
import yaml
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.data import adapter_entries
from nanodag.evaluation.forms import FORMS, read_form, shipped_forms
from nanodag.evaluation.harness import run_benchmark
from nanodag.evaluation.items import item_options
from tests.data.rows import IFEVAL, gpqa, humaneval, mbpp, write_rows
from tests.evaluation.scripted import Scripted

TASKS = Path(lm_eval.__file__).parent / "tasks"


class Writes(Scripted):
    """Gives answers in the order of the prompts, each up to the first stop string, and likelihoods by a hash."""

    def __init__(self, answers=()):
        super().__init__()
        self.answers, self.until = answers, set()

    def generate_until(self, requests):
        texts = []
        for request, text in zip(requests, self.answers, strict=True):
            prompt, settings = request.args
            self.asked.append(prompt)
            self.until |= set(settings["until"])
            for stop in settings["until"]:
                text = text.split(stop)[0]
            texts.append(text)
        return texts

    def loglikelihood(self, requests):
        self.asked += [request.args for request in requests]
        digests = [hashlib.blake2b(repr(request.args).encode(), digest_size=2).digest() for request in requests]
        return [(-float(int.from_bytes(digest)), False) for digest in digests]


def code_eval(references, predictions, k):
    def passes(program, test):
        try:
            exec(f"{program}\n{test}", {})
        except (ArithmeticError, AssertionError, NameError, SyntaxError, SystemExit, TypeError, ValueError):
            return False
        return True

    right = [any(passes(p, test) for p in programs) for programs, test in zip(predictions, references, strict=True)]
    return {"pass@1": sum(right) / len(right)}, {}


@pytest.fixture(scope="module", autouse=True)
def what_lm_evals_files_need():
    """lm-eval's files fetch a metric, a language detector and word lists, and ask for another antlr than is here.
    GPQA's choices, which it shuffles anew each time, are sorted on both sides."""
    version = importlib.metadata.version
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_of_hugging_face, "load", lambda name: SimpleNamespace(compute=code_eval))
        patch.setitem(sys.modules, "langdetect", SimpleNamespace(detect=lambda t: "en", LangDetectException=ValueError))
        patch.setitem(sys.modules, "immutabledict", SimpleNamespace(immutabledict=dict))
        patch.setattr(nltk, "download", lambda *names, **options: True)
        patch.setattr(
            importlib.metadata, "version", lambda name: "4.11" if name.startswith("antlr4") else version(name)
        )
        patch.setattr(random, "shuffle", lambda choices: choices.sort())
        patch.setattr(adapter_entries, "_shuffled", lambda question, choices: sorted(choices))
        yield


@dataclass(frozen=True, kw_only=True)
class Case:
    """file: lm-eval's. scores: ours -> filter and metric of lm-eval's. differs: answer -> our first score, where
    lm-eval's is the other. first_line: of lm-eval's prompt alone. fewshot: worked examples."""

    file: str
    rows: list
    adapter: str = "auto"
    scores: dict = field(default_factory=lambda: {"acc": ("none", "acc")})
    answers: list = field(default_factory=list)
    differs: dict = field(default_factory=dict)
    first_line: str = ""
    fewshot: list = field(default_factory=list)


GSM8K_ANSWERS = [
    "", " \n", "1200", "#### 1200", "#### 1,200", "#### $1,200", "#### 1200.", "#### 1200.00", "#### 1,200 dollars",
    "#### 1200, so", "The answer is 1,200, that is all", "12, so", "1200 apples and 3 pears", "#### 7 #### 1200",
    "####", "####1200", "#### -1200", "#### １２００", "#### 1.200", "It is $1200", "It is 1200...", "\\boxed{1200}",
    "1,2,0,0", "#### 1200\u00a0", "#### .", "#### +1200", "#### 1200%", "$", "1200 -", "$ 1200.", "#### \n1200",
    "#### 1200\n#### 7", "So.\n\n#### 1200", "#### 1200\n\nQuestion: next?\nAnswer: #### 7",
    "#### 1200\n\nAnother one.\n#### 7", "#### 1200</s>7", "1200<|im_end|>7",
]  # fmt: skip
CHOICES = {"text": ["sun", "the snow", "ice", "fog"], "label": ["A", "B", "C", "D"]}
ARC = [{"id": q, "question": q, "choices": CHOICES, "answerKey": key} for q, key in (("Hot?", "A"), (" Cold? ", "C"))]
MMLU = [
    {"question": f" {q} ", "choices": ["w", "x ", "y", "z"], "answer": n, "subject": "high_school_biology"}
    for n, q in enumerate(("Which?", "What?", "Why?\nSay."))
]
GSM8K = {"question": "How many? ", "answer": "600 * 2 = <<600*2=1200>>1200\n#### 1,200"}
BOTH = {"acc": ("none", "acc"), "acc_norm": ("none", "acc_norm")}
EXACT = {"exact_match": ("none", "exact_match")}
CASES = {
    "arc": Case(file="arc/arc_easy.yaml", rows=ARC, scores=BOTH),
    "arc_easy": Case(file="arc/arc_easy.yaml", rows=ARC, scores=BOTH, fewshot=ARC[:1]),
    "arc_challenge": Case(file="arc/arc_challenge.yaml", rows=ARC, scores=BOTH),
    "piqa": Case(
        file="piqa/piqa.yaml",
        rows=[{"goal": f"G{n} ", "sol1": "a", "sol2": "longer", "label": n % 2} for n in range(4)], scores=BOTH,
    ),
    "winogrande": Case(
        file="winogrande/default.yaml",
        rows=[
            {"sentence": f"A beat B {n} as _ was_hard, ", "option1": "A", "option2": "B", "answer": str(n % 2 + 1)}
            for n in range(4)
        ],
    ),
    "mmlu": Case(file="mmlu/default/mmlu_high_school_biology.yaml", rows=MMLU, fewshot=MMLU[:2]),
    "gpqa": Case(file="gpqa/zeroshot/gpqa_main_zeroshot.yaml", rows=[gpqa(q) for q in ("Where [title] ", "Who")]),
    "gsm8k": Case(
        file="gsm8k/gsm8k.yaml", rows=[GSM8K],
        scores={"exact_match": ("strict-match", "exact_match"), "flexible": ("flexible-extract", "exact_match")},
        answers=GSM8K_ANSWERS, fewshot=[GSM8K],
    ),
    "humaneval": Case(
        file="humaneval/humaneval.yaml", rows=[humaneval("add", "+")], adapter="humaneval",
        scores={"exact_match": ("create_test", "pass@1")},
        answers=[
            "", "    return a + b\n", "    return a - b", "return a + b", "    return a +", "    pass",
            "\treturn a + b", "    return a + b\n\ndef add(a, b):\n    return 1",
            "    return a + b\n# more\nx = (", "    return a + b\nif x", "    return a + b\nThat is all.",
            "    return a + b</s>", "```python\n    return a + b\n```", "    exit()",
            "    return a + b\n\nprint(1", "    return a + b\nclass X", "def add(a, b):\n    return a + b",
            '    """é"""\n    return a + b', "\n\n\n    return a + b", "    return str(a + b)", "    raise ValueError",
        ],
    ),
    "mbpp": Case(
        file="mbpp/mbpp.yaml", rows=[mbpp("add", "+")], adapter="mbpp", scores={"exact_match": ("none", "pass_at_1")},
        answers=[
            "", "def add(a, b): return a + b", "def add(a, b): return a - b", "exit()",
            "def add(a, b): return a + b\n[DONE]\nmore", "def plus(a, b): return a + b",
            "```python\ndef add(a, b): return a + b\n```", "Here it is: def add",
            "def add(a, b):\n    return a +", "add = lambda a, b: a + b", "  def add(a, b): return a + b",
            "def add(a, b): return a + b\nassert add(1, 2) == 4", "def add(a, b): return a + b\nThat is all.",
            "from operator import add", "def add(a, b): return a + b\n\nprint(add(1, 2))",
            "def add(a, b): return [a + b]",
        ],
        fewshot=[{**mbpp("take", "-"), "is_fewshot": True}],
    ),
    "math500": Case(
        file="minerva_math/minerva_math500.yaml",
        rows=[{"problem": "Half of $3x$?", "solution": "So $\\boxed{\\frac{3x}{2}}$.", "answer": "\\frac{3x}{2}"}],
        adapter="math", scores={"exact_match": ("none", "math_verify")},
        answers=[
            "", " $\\boxed{\\frac{3x}{2}}$", "It is $\\boxed{1.5x}$.", "So 1.5x", "The answer is $1.5x$, that is all",
            "Final Answer: The final answer is $\\frac32x$. I hope it is correct.\n\nProblem:\nNext\n\nSolution: $1$",
            "\\boxed{5x}", "\\boxed{1.5x", "\\boxed{1.5x, 5x}", "half of 3x", "$1.5 x$ cm", "1,5x", "３x/2",
            "So.\n\n$\\boxed{1.5x}$", "\\boxed{5x} or \\boxed{1.5x}",
        ],
        differs={"\\frac{3x}{2}": 1, "$1.5x$\n\nThat is all.": 0},
    ),
    "aime": Case(
        file="aime/aime24.yaml", rows=[{"ID": "1", "Problem": "What is 3 + 1?", "Solution": "", "Answer": 4}],
        adapter="aime", scores=EXACT,
        answers=[
            "", "4", " 4", "$4$", " \\boxed{4}", "$\\boxed{4}$", "It is 4", "It is $4$.", "\\boxed{ 4 }", "x=4", "-4",
            "\\boxed{4} or \\boxed{5}", "4\n\nQuestion: x\nAnswer: 5", "4<|eot_id|>5", "4</s>5", "4<|im_end|>5", "４",
            "4,5", "\\boxed{4",
        ],
        differs={
            **dict.fromkeys(["4.", "004", "\\boxed{4.0}", "So.\n\n4", "4 apples", "So $x$ is $4$", "\\boxed{2+2}"], 1),
            "\\boxed{5}, no, \\boxed{4}": 0,
        },
    ),
    "bbh": Case(
        file="bbh/zeroshot/boolean_expressions.yaml", rows=[{"input": "not False is", "target": "True"}], adapter="bbh",
        scores={"exact_match": ("flexible-extract", "exact_match")},
        first_line="Evaluate the result of a random Boolean expression.\n\n",
        answers=[
            "", "True", " True", " True\n\nQ: not True is\nA: False", "**True**", "The answer is True.", "False", "Yes",
            "the answer is false", ' "True"', " True</s>x", " True<|im_end|>", "So\nTrue", "Answer: True",
            "not False is True",
        ],
        differs={" true.": 1, "True, of course": 0, "True False": 0, "answer is True. answer is False": 0},
    ),
    "ifeval": Case(
        file="ifeval/ifeval.yaml", rows=[{"key": 1, "prompt": "Write.", **IFEVAL}], adapter="ifeval",
        scores={"exact_match": ("none", "prompt_level_strict_acc"), "loose": ("none", "prompt_level_loose_acc")},
        answers=[
            "Not one comma here.", "Here, one comma.", "Two words", "", " \n", "Sure, here:\nthree words follow",
            "three words follow\nbye, bye", "*a* b c", ", \none two three\n,", "So.\n\nthree words follow</s>",
        ],
        differs={"a b，c": 0},
    ),
}  # fmt: skip


def config_of(name, case, folder):
    def source(label, rows):
        return {"url": write_rows(folder / f"{label}.jsonl", rows), "adapter": case.adapter}

    rows = case.rows * max(1, len(case.answers) + len(case.differs))
    fewshot = source("fewshot", case.fewshot) if case.fewshot else None
    return BenchmarkConfig(name=name, source=source("items", rows), num_fewshot=len(case.fewshot), fewshot=fewshot)


def lm_evals_scores(model, file, config, folder):
    """filter and metric -> scores of the items, by lm-eval's own task file on our rows."""
    task = {
        "include": str(TASKS / file),
        "task": "theirs",
        **dict.fromkeys(("training_split", "validation_split"), None),
        "test_split": "test",
        "num_fewshot": config.num_fewshot,
        "fewshot_split": "fewshot" if config.num_fewshot else None,
        "fewshot_config": {"sampler": "first_n"},
        "dataset_kwargs": item_options(config, seed=0, mirror=""),
    }
    rows = "custom_dataset: !function nanodag.evaluation.items.rows\n"
    (folder / "theirs.yaml").write_text(yaml.safe_dump(task) + rows)
    tasks = TaskManager(include_path=str(folder), include_defaults=False).load(["theirs"])
    logged = evaluate(model, tasks, bootstrap_iters=0, confirm_run_unsafe_code=True)["samples"]["theirs"]
    scores = {}
    for sample in logged:
        for metric in sample["metrics"]:
            scores.setdefault((sample["filter"], metric), []).append(sample[metric])
    return scores


@pytest.mark.parametrize("name", list(CASES))
def test_a_benchmark_asks_stops_and_judges_as_lm_evals_task_file(name, tmp_path):
    case = CASES[name]
    config = config_of(name, case, tmp_path)
    answers = [*case.answers, *case.differs]
    ours, theirs = Writes(answers), Writes(answers)
    result = run_benchmark(ours, config, chat=False, seed=0, mirror="", folder=tmp_path)
    expected = lm_evals_scores(theirs, case.file, config, tmp_path)
    assert [case.first_line + asked if answers else asked for asked in ours.asked] == theirs.asked
    assert ours.until == theirs.until
    for metric, key in case.scores.items():
        scores = [record["scores"][metric] for record in result.records]
        alike = zip(case.answers or scores, scores, expected[key], strict=False)
        assert [(answer, score) for answer, score, other in alike if score != other] == []
    main, key = next(iter(case.scores.items()))
    for place, (answer, score) in enumerate(case.differs.items(), start=len(case.answers)):
        found = result.records[place]["scores"][main], expected[key][place]
        assert (answer, *found) == (answer, score, 1 - score)


def test_mmlu_names_every_subject_as_lm_eval_does():
    description = jinja2.Template(read_form(FORMS / "mmlu.yaml")["description"], keep_trailing_newline=True)
    files = sorted((TASKS / "mmlu/default").glob("mmlu_*.yaml"))
    assert len(files) == 57
    for file in files:
        task = yaml.safe_load(file.read_text())
        assert description.render(subject=task["dataset_name"]) == task["description"]


def test_every_shipped_form_is_held_against_lm_evals_but_those_that_it_does_not_have():
    ours_alone = {"bits_per_byte", "continuation", "multiple_choice", "problems", "simpleqa", "verifiers"}
    assert set(shipped_forms()) - ours_alone == set(CASES)
