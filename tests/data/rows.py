"""Rows as data sets have them, and files of rows."""

import json
from pathlib import Path

from nanodag.data.config import SourceConfig


def write_rows(path: Path, rows: list) -> str:
    """The URL of a file with these rows, written now."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"file:{path}"


def source_of(path: Path, rows: list) -> SourceConfig:
    return SourceConfig(url=write_rows(path, rows))


GSM8K = [
    {"question": "Q1 ?", "answer": "48/2 = <<48/2=24>>24\n#### 24"},
    {"question": "Q2 ?", "answer": "#### 1,234"},
    {"question": "Q3 ?", "answer": "#### -5"},
    {"question": "Q4 ?", "answer": "#### 7"},
    {"question": "Q5 ?", "answer": "#### 8"},
]
GSM8K_TEXTS = {
    "Q1": "Half of 48.\n#### 24",
    "Q2": "so it is $1,234",  # right number, not behind ####
    "Q3": "#### -5.0\nQuestion",
    "Q4": "#### 7 #### 8",  # two tries
    "Q5": "I do not know",
}
IFEVAL = {"instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"]}
IFEVAL["kwargs"] = [{"num_words": None, "relation": None}, {"num_words": 3, "relation": "at least"}]


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


def unpack(batch):
    """(input_ids, labels) of each document of a batch, row by row: what packing must not change."""
    for row in range(len(batch.input_ids)):
        for document in range(int(batch.document_ids[row].max(initial=-1)) + 1):
            here = batch.document_ids[row] == document
            yield batch.input_ids[row, here], batch.labels[row, here]
