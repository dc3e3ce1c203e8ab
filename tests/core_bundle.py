"""A bundle of CORE's items: 22 files of a few made-up rows."""

import json
import shutil
import tempfile
from pathlib import Path

from nanodag.data.core_tasks import TASKS

CHOICE = [
    {"query": f"the {w}", "choices": ["sat on the mat", "ran", "and after"], "gold": n % 3}
    for n, w in enumerate("abcdef")
]
SCHEMA = [
    {"context_options": [f"the {w} cat", f"a {w} dog"], "continuation": "sat on it", "gold": n % 2}
    for n, w in enumerate("abcdef")
]
TEXT = [{"context": f" the cat {w} ", "continuation": "sat on"} for w in "abcdef"]
ROWS = {"multiple_choice": CHOICE, "schema": SCHEMA, "language_modeling": TEXT}


def write_bundle(folder: Path) -> Path:
    """12 rows a task, more than its worked examples; the folder of the bundle's files."""
    for number, task in enumerate({task.file: task for task in TASKS}.values()):  # two share a file
        category = folder / "eval_data" / f"category{number % 3}"
        category.mkdir(parents=True, exist_ok=True)
        lines = ROWS[task.kind] * 2
        (category / f"{task.file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "eval_data"


def write_archive(path: Path) -> None:
    """The same as a zip."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_bundle(Path(folder) / "eval_bundle")
        shutil.make_archive(str(path.with_suffix("")), "zip", folder)
