"""ChatCORE: nanochat's six chat tasks as one number, the mean of their scores, each centred by chance. No torch here.

A chat stage that has benchmarks of these names, all asked as a chat, gets it beside them. 0 is guessing, 1 all right.
The questions are put in the words of our own forms, so the number compares models of this project; nanochat words them
otherwise, lets GSM8K and SpellingBee use a tool, and has words of its own to spell.

Source: karpathy/nanochat scripts/chat_eval.py (tasks, chances, mean).
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanodag.evaluation.intervals import centred_mean
from nanodag.evaluation.paired import read_records
from nanodag.evaluation.results import BenchmarkResult

NAME = "chat_core"
TASKS: Mapping[str, float] = {  # benchmark -> the score of guessing
    "arc_easy_chat": 0.25,
    "arc_challenge_chat": 0.25,
    "mmlu": 0.25,
    "gsm8k": 0.0,
    "humaneval": 0.0,
    "spelling_bee": 0.0,
}


def chat_core_of(results: Mapping[str, Mapping[str, Any]], samples: Path) -> BenchmarkResult | None:
    """ChatCORE of a stage's results; None where one of the tasks is not there, or was not asked as a chat.

    results: by benchmark, as in results.json. samples: the folder of their records. Its records are the tasks' items,
    with weights that make each task count as much, so two models are compared item by item.
    """
    if not all(results.get(name, {}).get("chat") for name in TASKS):
        return None
    records = [record for name in TASKS for record in _records(name, results[name]["metric"], samples)]
    counts = Counter(record["part"] for record in records)
    tasks = [(results[name]["value"], results[name]["stderr"], counts[name], TASKS[name]) for name in TASKS]
    return BenchmarkResult(
        name=NAME,
        form=NAME,
        metric=NAME,
        base_metric=NAME,
        higher_is_better=True,
        is_chat=True,
        num_fewshot=0,
        scores={NAME: centred_mean(tasks)},
        records=records,
    )


def _centred(score: float, chance: float) -> float:
    return (score - chance) / (1 - chance)


def _records(name: str, metric: str, samples: Path) -> list[dict[str, Any]]:
    given = read_records(samples / f"{name}.jsonl")
    return [
        {
            "id": f"{name}:{record['id']}",
            "part": name,
            "weight": 1 / len(given),
            "scores": {NAME: _centred(record["scores"][metric], TASKS[name])},
            **{count: record[count] for count in ("too_long", "unparsed", "truncated") if count in record},
        }
        for record in given
    ]
