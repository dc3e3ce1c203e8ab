"""CORE's tasks: 22 in-context tasks of the DCLM paper, their files, their items, and the texts of an item.

For a task, accuracy is centred so that guessing is 0 and all right is 1; CORE is the mean of the 22. Order, few-shot
examples and limit are nanochat's, so no stage's seed has a part in them.

The bundle is a folder or an archive with the 22 files at any depth, `hellaswag.jsonl` and so on (also .gz or .zst),
as nanochat's eval_bundle.

Sources: DataComp-LM, arXiv:2406.11794; tasks, shots and baselines of mlfoundations/dclm eval/heavy.yaml,
additional_aggregation.json (low_variance_datasets) and eval_meta_data_v1.csv; karpathy/nanochat nanochat/core_eval.py.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from nanodag.data.archives import unpacked
from nanodag.data.opening import open_source
from nanodag.data.urls import parse_url
from nanodag.errors import SourceError
from nanodag.host.beside import table_beside

Kind = Literal["multiple_choice", "schema", "language_modeling"]


@dataclass(frozen=True)
class Task:
    """file: name in the bundle, without ending. baseline: accuracy of guessing. num_items: of its file.

    item_bytes: text that is scored of an item, with worked examples and all answers, on average over the first 100. Of
    hellaswag, coqa and squad the files that were counted were made like the bundle's."""

    label: str
    file: str
    kind: Kind
    num_fewshot: int
    delimiter: str
    baseline: float
    num_items: int
    item_bytes: int


TASKS = tuple(Task(**task) for task in table_beside(__file__))

FEWEST_ITEMS = 1 + max(task.num_fewshot for task in TASKS)
"""Of a task's items that are read: worked examples are drawn among them."""

Item = Mapping[str, Any]


def centred(accuracy: float, baseline: float) -> float:
    """0 for guessing, 1 for all right."""
    return (accuracy - baseline) / (1 - baseline)


def core_of(accuracies: Mapping[str, float]) -> float:
    """CORE, of the accuracy of each task by its label."""
    return sum(centred(accuracies[task.label], task.baseline) for task in TASKS) / len(TASKS)


def bundle_url(bundle: str) -> str:
    """The source of a bundle's items. bundle: a folder, or an archive's URL."""
    return bundle if "://" in bundle else f"file:{bundle}/**/*.jsonl*"


def find_files(url: str, mirror: Path | None = None) -> dict[str, Path]:
    """The file of each task in an archive, or below the folder where a `file:` URL's pattern begins.

    Raises SourceError naming files that are there twice, or missing: a mean over fewer tasks is another number.
    """
    root = Path(*takewhile(lambda part: not set(part) & set("*?["), Path(url.removeprefix("file:")).parts))
    root = unpacked(parse_url(url), mirror) if "://" in url else root
    task_files = {task.file for task in TASKS}
    path_by_task: dict[str, Path] = {}
    for path in sorted(root.rglob("*.jsonl*")):
        name = path.name.split(".")[0]
        if name in task_files and name in path_by_task:
            raise SourceError(f"CORE's {name} is there twice: {path_by_task[name]} and {path}. Remove one of them.")
        path_by_task[name] = path
    if missing := sorted(task_files - path_by_task.keys()):
        raise SourceError(
            f"CORE needs all of its tasks; {root} lacks {', '.join(f'{name}.jsonl' for name in missing)}."
        )
    return path_by_task


def read_items(path: Path, limit: int) -> list[Item]:
    """A task's items, shuffled as nanochat does, the first `limit` of them (0: all)."""
    items: list[Item] = [row for _, row in open_source(f"file:{path}").rows()]
    random.Random(1337).shuffle(items)
    return items[:limit] if limit else items


def prompts_of(task: Task, data: Sequence[Item], number: int) -> list[str]:
    """The texts of one item: with each choice, with each context, or without and with the continuation."""
    others = [i for i in range(len(data)) if i != number]
    examples = [data[i] for i in random.Random(1234 + number).sample(others, task.num_fewshot)]
    item, delimiter = data[number], task.delimiter
    if task.kind == "multiple_choice":
        before = "".join(f"{e['query']}{delimiter}{e['choices'][e['gold']]}\n\n" for e in examples)
        return [f"{before}{item['query']}{delimiter}{choice}" for choice in item["choices"]]
    if task.kind == "schema":
        before = "".join(f"{e['context_options'][e['gold']]}{delimiter}{e['continuation']}\n\n" for e in examples)
        return [f"{before}{context}{delimiter}{item['continuation']}" for context in item["context_options"]]
    before = "".join(f"{e['context'].strip()}{delimiter}{e['continuation']}\n\n" for e in examples)
    without = f"{before}{item['context'].strip()}{delimiter}"
    return [without.strip(), f"{without}{item['continuation']}"]
