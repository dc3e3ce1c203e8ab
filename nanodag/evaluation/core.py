"""CORE and ChatCORE: many tasks as one number, the mean of their scores, each centred by chance.

CORE is a benchmark of an eval stage (`core`), with the accuracy of each task beside it.

source: the bundle's files, `file:BUNDLE/eval_data/*/*.jsonl` (also .gz or .zst), or its archive's URL; without one,
the pipeline's core_bundle. limit: items a task. What is asked is nanodag.data.core_tasks', how it is scored
nanodag.model.core_scoring's: training scores the same.

ChatCORE is of nanochat's six chat tasks. A chat stage that has benchmarks of these names, all asked as a chat, gets it
beside them. 0 is guessing, 1 all right. The questions are put in the words of our own forms, so the number compares
models of this project; nanochat words them otherwise, lets GSM8K and SpellingBee use a tool, and has words of its own
to spell. Source: karpathy/nanochat scripts/chat_eval.py (tasks, chances, mean).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.data.core_tasks import TASKS, Item, Task, centred, find_files, read_items
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.evaluation.intervals import Score, centred_mean, score_of
from nanodag.evaluation.paired import read_records
from nanodag.evaluation.results import COUNTS, BenchmarkResult
from nanodag.host.beside import table_beside
from nanodag.model.core_scoring import CHUNK_ITEMS, JudgedItem, judge_items

CHAT_CORE = "chat_core"
# Benchmark -> the score of guessing.
CHAT_TASKS: Mapping[str, float] = table_beside(__file__, "chat_core.yaml")


def run_core(checkpoint: EvaluatedModel, config: BenchmarkConfig, mirror: Path | None = None) -> BenchmarkResult:
    """CORE, with the accuracy of each task beside it.

    Raises SourceError naming the files of tasks that the source lacks: a mean over fewer tasks is another number.
    """
    assert config.source is not None  # derived
    files = find_files(config.source.url, mirror)
    checkpoint.is_chat = False
    records: list[dict[str, Any]] = []
    scores: dict[str, Score] = {}
    for task in TASKS:
        data = read_items(files[task.file], config.limit)
        judged = score_task(checkpoint, task, data)
        scores[task.label] = score_of([float(item.is_right) for item in judged])
        for number, item in enumerate(judged):
            is_right = float(item.is_right)
            both = {"core": centred(is_right, task.baseline), task.label: is_right}
            records.append(_record(task.label, number, len(data), both, {"too_long": True} if item.is_too_long else {}))
    task_scores = [(scores[task.label], task.baseline) for task in TASKS]
    core = centred_mean([(score.value, score.stderr, score.num_items, chance) for score, chance in task_scores])
    how: dict[str, Any] = {"form": "core", "base_metric": "core", "is_chat": False, "records": records}
    return BenchmarkResult(config=config, scores={"core": core, **scores}, **how)


def _record(
    part: str, name: int | str, num_items: int, scores: Mapping[str, float], counts: Mapping[str, Any]
) -> dict[str, Any]:
    """Record of an item of one of the tasks, which all count as much. name: of the item there."""
    return {"id": f"{part}:{name}", "part": part, "weight": 1 / num_items, "scores": scores, **counts}


def score_task(checkpoint: EvaluatedModel, task: Task, data: Sequence[Item]) -> list[JudgedItem]:
    """Verdicts of a task's items, in order."""
    judged: list[JudgedItem] = []
    for start in range(0, len(data), CHUNK_ITEMS):
        numbers = range(start, min(start + CHUNK_ITEMS, len(data)))
        judged += judge_items(checkpoint.score, checkpoint.document, checkpoint.max_positions, task, data, numbers)
    return judged


def chat_core_of(results: Mapping[str, Mapping[str, Any]], samples: Path) -> BenchmarkResult | None:
    """ChatCORE of a stage's results; None where one of the tasks is not there, or was not asked as a chat.

    results: by benchmark, as in results.json. samples: the folder of their records. Its records are the tasks' items,
    with weights that make each task count as much, so two models are compared item by item.
    """
    if not all(results.get(name, {}).get("chat") for name in CHAT_TASKS):
        return None
    records: list[dict[str, Any]] = []
    tasks: list[tuple[float, float, int, float]] = []
    for name, chance in CHAT_TASKS.items():
        result, of_task = results[name], read_records(samples / f"{name}.jsonl")
        tasks.append((result["value"], result["stderr"], len(of_task), chance))
        for record in of_task:
            score = {CHAT_CORE: centred(record["scores"][result["metric"]], chance)}
            counts = {count: record[count] for count in COUNTS if count in record}
            records.append(_record(name, record["id"], len(of_task), score, counts))
    how: dict[str, Any] = {"form": CHAT_CORE, "base_metric": CHAT_CORE, "is_chat": True, "records": records}
    return BenchmarkResult(config=BenchmarkConfig(name=CHAT_CORE), scores={CHAT_CORE: centred_mean(tasks)}, **how)
