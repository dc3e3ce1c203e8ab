"""CORE as a benchmark of an eval stage (`core`): one number, with the accuracy of each task beside it.

source: the bundle's files, `file:BUNDLE/eval_data/*/*.jsonl` (also .gz or .zst); without one, the pipeline's
core_bundle. limit: items a task. What is asked is nanodag.data.core_tasks', how it is scored
nanodag.model.core_scoring's: training scores the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.data.core_tasks import TASKS, Item, Task, centred, find_files, read_items
from nanodag.errors import ConfigError
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.evaluation.intervals import Score, centred_mean, score_of
from nanodag.evaluation.results import BenchmarkResult
from nanodag.model.core_scoring import CHUNK_ITEMS, JudgedItem, judge_items


def run_core(checkpoint: EvaluatedModel, config: BenchmarkConfig) -> BenchmarkResult:
    """CORE, with the accuracy of each task beside it.

    Raises SourceError naming the files of tasks that the source lacks: a mean over fewer tasks is another number.
    """
    files = find_files(_url_of(config))
    checkpoint.is_chat = False
    records: list[dict[str, Any]] = []
    scores: dict[str, Score] = {}
    for task in TASKS:
        data = read_items(files[task.file], config.limit)
        judged = score_task(checkpoint, task, data)
        scores[task.label] = score_of([float(one.is_right) for one in judged])
        records += [
            {
                "id": f"{task.label}:{number}",
                "part": task.label,
                "weight": 1 / len(data),
                "scores": {"core": centred(float(one.is_right), task.baseline), task.label: float(one.is_right)},
                **({"too_long": True} if one.is_too_long else {}),
            }
            for number, one in enumerate(judged)
        ]
    return BenchmarkResult(
        name=config.name,
        form="core",
        metric="core",
        base_metric="core",
        higher_is_better=True,
        is_chat=False,
        num_fewshot=0,
        scores={"core": _core_of(scores), **scores},
        records=records,
    )


def _url_of(config: BenchmarkConfig) -> str:
    if config.source is None or not config.source.url.startswith("file:"):
        raise ConfigError(f"Benchmark {config.name!r} needs `source: file:BUNDLE/eval_data/*/*.jsonl`.")
    return config.source.url


def score_task(checkpoint: EvaluatedModel, task: Task, data: Sequence[Item]) -> list[JudgedItem]:
    """Whether each item is answered rightly."""
    judged: list[JudgedItem] = []
    for start in range(0, len(data), CHUNK_ITEMS):
        numbers = range(start, min(start + CHUNK_ITEMS, len(data)))
        judged += judge_items(checkpoint.score, checkpoint.document, checkpoint.max_positions, task, data, numbers)
    return judged


def _core_of(scores: Mapping[str, Score]) -> Score:
    given = [(scores[task.label], task.baseline) for task in TASKS]
    return centred_mean([(score.value, score.stderr, score.num_items, chance) for score, chance in given])
