"""CORE: 22 in-context tasks of the DCLM paper as one number, scored as nanochat does (benchmark `core`).

For a task, accuracy is centred so that guessing is 0 and all right is 1; CORE is the mean of the 22. Only nanochat's
rule for tokens gives its numbers. Whole prompts are tokenised, and the scored tokens depend on the kind of task:
multiple choice: all behind the tokens that a question's prompts have in common; schema: the common end;
language modeling: all behind the prompt without its answer.

source: the bundle's files, `file:BUNDLE/eval_data/*/*.jsonl` (also .gz or .zst). limit: items a task. Order, few-shot
examples and limit are nanochat's too, so the stage's seed has no part in them.

Sources: DataComp-LM, arXiv:2406.11794; tasks, shots and baselines of mlfoundations/dclm eval/heavy.yaml,
additional_aggregation.json (low_variance_datasets) and eval_meta_data_v1.csv; karpathy/nanochat nanochat/core_eval.py.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.data.sources import open_source
from nanodag.errors import ConfigError, SourceError
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.evaluation.intervals import Z95, Score, score_of
from nanodag.evaluation.results import BenchmarkResult
from nanodag.evaluation.scoring import AnswerScore, Question

Kind = Literal["multiple_choice", "schema", "language_modeling"]
CHUNK_ITEMS = 256  # few-shot prompts are long: this many items' tokens are held at once
ANSWER = "\nAnswer: "


@dataclass(frozen=True)
class Task:
    """file: name in the bundle, without ending. baseline: accuracy of guessing."""

    label: str
    file: str
    kind: Kind
    num_fewshot: int
    delimiter: str
    baseline: float


TASKS = (
    Task("hellaswag_zeroshot", "hellaswag", "multiple_choice", 0, " ", 0.25),
    Task("jeopardy", "jeopardy_all", "language_modeling", 10, ANSWER, 0.0),
    Task("bigbench_qa_wikidata", "bigbench_qa_wikidata", "language_modeling", 10, " ", 0.0),
    Task("arc_easy", "arc_easy", "multiple_choice", 10, ANSWER, 0.25),
    Task("arc_challenge", "arc_challenge", "multiple_choice", 10, ANSWER, 0.25),
    Task("copa", "copa", "multiple_choice", 0, " ", 0.5),
    Task("commonsense_qa", "commonsense_qa", "multiple_choice", 10, " ", 0.2),
    Task("piqa", "piqa", "multiple_choice", 10, ANSWER, 0.5),
    Task("openbook_qa", "openbook_qa", "multiple_choice", 0, " ", 0.25),
    Task("lambada_openai", "lambada_openai", "language_modeling", 0, " ", 0.0),
    Task("hellaswag", "hellaswag", "multiple_choice", 10, " ", 0.25),
    Task("winograd", "winograd_wsc", "schema", 0, " ", 0.5),
    Task("winogrande", "winogrande", "schema", 0, " ", 0.5),
    Task("bigbench_dyck_languages", "bigbench_dyck_languages", "language_modeling", 10, " ", 0.0),
    Task("agi_eval_lsat_ar", "agi_eval_lsat_ar", "multiple_choice", 3, " ", 0.2),
    Task("bigbench_cs_algorithms", "bigbench_cs_algorithms", "language_modeling", 10, " ", 0.0),
    Task("bigbench_operators", "bigbench_operators", "language_modeling", 10, " ", 0.0),
    Task("bigbench_repeat_copy_logic", "bigbench_repeat_copy_logic", "language_modeling", 10, " ", 0.0),
    Task("squad", "squad", "language_modeling", 10, " ", 0.0),
    Task("coqa", "coqa", "language_modeling", 0, " ", 0.0),
    Task("boolq", "boolq", "multiple_choice", 10, ANSWER, 0.62),
    Task("bigbench_language_identification", "bigbench_language_identification", "multiple_choice", 10, " ", 0.091),
)

Item = Mapping[str, Any]


def run_core(checkpoint: EvaluatedModel, config: BenchmarkConfig) -> BenchmarkResult:
    """CORE, with the accuracy of each task beside it.

    Raises SourceError naming the files of tasks that the source lacks: a mean over fewer tasks is another number.
    """
    files = find_files(config)
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
        scores={"core": _core_of(scores, len(records)), **scores},
        records=records,
    )


def centred(accuracy: float, baseline: float) -> float:
    """0 for guessing, 1 for all right."""
    return (accuracy - baseline) / (1 - baseline)


def find_files(config: BenchmarkConfig) -> dict[str, Path]:
    """The file of each task below the folder where the source's pattern begins."""
    if config.source is None or not config.source.url.startswith("file:"):
        raise ConfigError(f"Benchmark {config.name!r} needs `source: file:BUNDLE/eval_data/*/*.jsonl`.")
    parts = Path(config.source.url.removeprefix("file:")).parts
    root = Path(*takewhile(lambda part: not set(part) & set("*?["), parts))
    path_by_task = {path.name.split(".")[0]: path for path in sorted(root.rglob("*.jsonl*"))}
    if missing := sorted({task.file for task in TASKS} - path_by_task.keys()):
        raise SourceError(
            f"CORE needs all of its tasks; {root} lacks {', '.join(f'{name}.jsonl' for name in missing)}."
        )
    return path_by_task


def read_items(path: Path, limit: int) -> list[Item]:
    """A task's items, shuffled as nanochat does, the first `limit` of them (0: all)."""
    items: list[Item] = [row for _, row in open_source(f"file:{path}").rows()]
    random.Random(1337).shuffle(items)
    return items[:limit] if limit else items


@dataclass(frozen=True)
class Judged:
    """is_too_long: a prompt of the item lost its beginning, as nanochat has it."""

    is_right: bool
    is_too_long: bool


def score_task(checkpoint: EvaluatedModel, task: Task, data: Sequence[Item]) -> list[Judged]:
    """Whether each item is answered rightly."""
    judged: list[Judged] = []
    for start in range(0, len(data), CHUNK_ITEMS):
        numbers = range(start, min(start + CHUNK_ITEMS, len(data)))
        groups = [_questions(checkpoint, task, data, number) for number in numbers]
        flat = checkpoint.score([question for group, _ in groups for question in group])
        scored = iter(flat)
        for number, (group, is_too_long) in zip(numbers, groups, strict=True):
            answers = [answer for _ in group for answer in next(scored)]
            lengths = [len(answer) for question in group for answer in question.answers]
            judged.append(Judged(_judge(task, data[number], answers, lengths), is_too_long))
    return judged


def _questions(
    checkpoint: EvaluatedModel, task: Task, data: Sequence[Item], number: int
) -> tuple[list[Question], bool]:
    """What is scored for one item: one question with all choices, or one for each context, or one answer; and whether
    a prompt is too long."""
    tokens = [tuple(checkpoint.document(prompt)) for prompt in prompts_of(task, data, number)]
    wanted = tokens[1:] if task.kind == "language_modeling" else tokens
    is_too_long = max(map(len, wanted)) > checkpoint.max_positions
    if task.kind == "schema":
        shared = _common([ids[::-1] for ids in tokens])
        split = [(ids[: len(ids) - shared], ids[len(ids) - shared :]) for ids in tokens]
    else:
        shared = _common(tokens)
        split = [(ids[:shared], ids[shared:]) for ids in wanted]
        if not is_too_long:
            return [Question(split[0][0], tuple(answer for _, answer in split))], False
    # Prompts that are too long lose their beginnings, each as much as it must, so they share no context any more.
    room = checkpoint.max_positions
    return [Question(context[-(room - len(answer)) :], (answer,)) for context, answer in split], is_too_long


def prompts_of(task: Task, data: Sequence[Item], number: int) -> list[str]:
    """The texts of one item: with each choice, with each context, or without and with the continuation."""
    others = [i for i in range(len(data)) if i != number]
    examples = (
        [data[i] for i in random.Random(1234 + number).sample(others, task.num_fewshot)] if task.num_fewshot else []
    )
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


def _judge(task: Task, item: Item, answers: Sequence[AnswerScore], lengths: Sequence[int]) -> bool:
    if task.kind == "language_modeling":
        return answers[0].is_greedy
    losses = [-answer.logprob / length for answer, length in zip(answers, lengths, strict=True)]
    return losses.index(min(losses)) == item["gold"]


def _common(sequences: Sequence[tuple[int, ...]]) -> int:
    """How many tokens all sequences begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*sequences, strict=False)))


def _core_of(scores: Mapping[str, Score], num_items: int) -> Score:
    """The mean of centred accuracies; its error adds up the tasks', which are independent."""
    value = sum(centred(scores[task.label].value, task.baseline) for task in TASKS) / len(TASKS)
    stderr = math.hypot(*(scores[task.label].stderr / (1 - task.baseline) for task in TASKS)) / len(TASKS)
    return Score(value=value, stderr=stderr, low=value - Z95 * stderr, high=value + Z95 * stderr, num_items=num_items)
