"""Items of CORE as questions to a model, and whether it answers them rightly, as nanochat scores them.

Only nanochat's rule for tokens gives its numbers. Whole prompts are tokenised, and the scored tokens depend on the kind
of task: multiple choice: all behind the tokens that a question's prompts have in common; schema: the common end;
language modeling: all behind the prompt without its answer.

Source: karpathy/nanochat nanochat/core_eval.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanodag.data.core_tasks import Item, Task, prompts_of
from nanodag.model.scoring import AnswerScore, Question, num_common

CHUNK_ITEMS = 256  # few-shot prompts are long: this many items' tokens are held at once

Document = Callable[[str], Sequence[int]]
"""A text as token ids, with the start-of-document token in front where the tokenizer has one."""
Score = Callable[[Sequence[Question]], Sequence[Sequence[AnswerScore]]]
"""Scores of every answer of every question, in order."""


@dataclass(frozen=True)
class JudgedItem:
    """is_too_long: a prompt of the item lost its beginning, as nanochat has it; or an answer alone has no room in the
    model's positions, and the item counts as wrong."""

    is_right: bool
    is_too_long: bool


def judge_items(
    score: Score, document: Document, max_positions: int, task: Task, data: Sequence[Item], numbers: Sequence[int]
) -> list[JudgedItem]:
    """Judge a model's answers to items of a task. data: all of the task's, of which few-shot examples are drawn;
    numbers: those that are asked. `score` is called once, for no questions where there are no numbers."""
    items = [_questions(document, max_positions, task, data, number) for number in numbers]
    scored = iter(score([question for questions, _ in items for question in questions]))
    judged: list[JudgedItem] = []
    for number, (questions, is_too_long) in zip(numbers, items, strict=True):
        answers = [answer for _ in questions for answer in next(scored)]
        lengths = [len(answer) for question in questions for answer in question.answers]
        is_right = bool(questions) and _judge(task, data[number], answers, lengths)
        judged.append(JudgedItem(is_right, is_too_long))
    return judged


def _questions(
    document: Document, max_positions: int, task: Task, data: Sequence[Item], number: int
) -> tuple[list[Question], bool]:
    """Questions that score one item: one with all choices, or one for each context, or one answer, nothing where
    an answer alone is too long; and whether a prompt is too long."""
    tokens = [tuple(document(prompt)) for prompt in prompts_of(task, data, number)]
    texts = tokens[1:] if task.kind == "language_modeling" else tokens
    is_too_long = max(map(len, texts)) > max_positions
    if task.kind == "schema":
        shared = num_common([ids[::-1] for ids in tokens])
        split = [(ids[: len(ids) - shared], ids[len(ids) - shared :]) for ids in tokens]
    else:
        shared = min(num_common(tokens), min(map(len, texts)) - 1)  # a choice may be the beginning of another one
        split = [(ids[:shared], ids[shared:]) for ids in texts]
        if not is_too_long:
            return [Question(split[0][0], tuple(answer for _, answer in split))], False
    if max(len(answer) for _, answer in split) >= max_positions:
        return [], True
    # Prompts that are too long lose their beginnings, each as much as it must, so they share no context any more.
    return [Question(context[-(max_positions - len(answer)) :], (answer,)) for context, answer in split], is_too_long


def _judge(task: Task, item: Item, answers: Sequence[AnswerScore], lengths: Sequence[int]) -> bool:
    if task.kind == "language_modeling":
        return answers[0].is_greedy
    losses = [-answer.logprob / length for answer, length in zip(answers, lengths, strict=True)]
    return losses.index(min(losses)) == item["gold"]
