"""Log-probabilities of answers under a model, a question's context computed once for all its answers.

Letters: T tokens of a batch, N scored tokens, M places that predict them, D model width, V vocabulary.

A question with the context c and the answers x and y becomes c x y: answer tokens see the context and their own answer
only, and their positions go on from the context's. Four choices of 5 tokens behind a context of 30 cost 46 tokens
instead of 136. One-token answers cost nothing beyond the context, and what all answers begin with is part of it. The
questions of a batch lie one after the other in one row, without padding (nanodag.model.group_attention). The last layer
is computed at the places that predict alone, but for its keys and values.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from nanodag.errors import ConfigError, TrainingDiverged
from nanodag.model import cpu_head
from nanodag.model.attention import on_device
from nanodag.model.cpu_linear import times_transposed
from nanodag.model.decoder import Decoder
from nanodag.model.group_attention import group_attention
from nanodag.store.kept_lines import KeptLines, content_key

MAX_LOGITS = {"cuda": 1 << 25, "cpu": 1 << 22}  # numbers of one slice of (M, V): on a CPU 16 MB, near its caches


@dataclass(frozen=True)
class Question:
    """Token ids. context: at least one. answers: at least one, of at least one token each."""

    context: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]

    @cached_property
    def shared(self) -> int:
        """How many tokens all answers begin with, of those that are read: an answer's last is predicted, never read."""
        first, last = min(self.answers), max(self.answers)  # what these two begin with all do
        room = min(map(len, self.answers)) - 1
        return next((i for i in range(room) if first[i] != last[i]), room)

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.context) + self.shared + sum(len(answer) - 1 - self.shared for answer in self.answers)

    def fits(self, max_positions: int) -> bool:
        """Whether the context leaves its longest answer room."""
        return len(self.context) + max(map(len, self.answers)) - 1 <= max_positions


@dataclass(frozen=True)
class AnswerScore:
    """logprob: natural log, summed over the answer's tokens. is_greedy: each of them was the most likely one."""

    logprob: float
    is_greedy: bool


Numbered = list[tuple[int, Question]]


def score_questions(
    models: Sequence[Decoder],
    questions: Sequence[Question],
    *,
    micro_batch_tokens: int,
    max_positions: int,
    on_batch: Callable[[int], None] = lambda done: None,
    kept: KeptLines | None = None,
) -> list[list[AnswerScore]]:
    """Scores of every answer of every question, in the order given.

    models: of the same weights, each on a device of its own; whichever is free takes the next batch.
    micro_batch_tokens: at once; a question that is longer goes alone. max_positions: a context that
    leaves its longest answer no room loses tokens at its front. on_batch gets the number of questions done.
    kept: batches that are done already, and where others are kept. A batch is kept whole: in another one, its scores
    could be rounded otherwise.

    Raises ConfigError when an answer alone is longer than max_positions, TrainingDiverged for numbers that are not
    finite.
    """
    batches = in_batches(questions, micro_batch_tokens=micro_batch_tokens, max_positions=max_positions)
    scores: list[list[AnswerScore]] = [[] for _ in questions]
    known = [None if kept is None else kept.get(_key(batch)) for batch in batches]
    computed = _each_batch(models, [batch for batch, found in zip(batches, known, strict=True) if found is None])
    num_done = 0
    for batch, before in zip(batches, known, strict=True):
        if before is not None:
            found = [[AnswerScore(*one) for one in row] for row in before]
        else:
            found = next(computed)
            if not all(math.isfinite(one.logprob) for row in found for one in row):
                raise TrainingDiverged(
                    "The model's log-probabilities are not finite: its weights have diverged or are damaged, so there "
                    "is nothing to score. Evaluate an earlier checkpoint, or train it again with a lower rate."
                )
            if kept is not None:
                kept.add({_key(batch): [[(one.logprob, one.is_greedy) for one in row] for row in found]})
        for (index, _), row_scores in zip(batch, found, strict=True):
            scores[index] = row_scores
        num_done += len(batch)
        on_batch(num_done)
    return scores


def in_batches(questions: Sequence[Question], *, micro_batch_tokens: int, max_positions: int) -> list[Numbered]:
    """All questions with their numbers, in batches of at most micro_batch_tokens; one that is longer comes
    alone. Contexts are cut as in `score_questions`, which says what is raised."""
    fitted = [_fit(question, max_positions) for question in questions]
    # Longest first: an out-of-memory comes at once, and questions of one batch are of about one length.
    order = sorted(range(len(fitted)), key=lambda i: (-fitted[i].num_tokens, i))
    batches: list[Numbered] = []
    room = 0
    for number in order:
        if (size := fitted[number].num_tokens) > room:
            batches.append([])
            room = micro_batch_tokens
        batches[-1].append((number, fitted[number]))
        room -= size
    return batches


def _key(batch: Numbered) -> str:
    return content_key("scored", [[question.context, question.answers] for _, question in batch])


def _each_batch(models: Sequence[Decoder], batches: Sequence[Numbered]) -> Iterator[list[list[AnswerScore]]]:
    """The scores of each batch, in order. A thread a model: it waits for its device most of the time."""
    if len(models) == 1:
        yield from (_score_on(models[0], batch) for batch in batches)
        return
    free: SimpleQueue[Decoder] = SimpleQueue()
    for model in models:
        free.put(model)

    def score(batch: Numbered) -> list[list[AnswerScore]]:
        model = free.get()
        try:
            return _score_on(model, batch)
        finally:
            free.put(model)

    with ThreadPoolExecutor(len(models)) as pool:
        yield from pool.map(score, batches)


def _fit(question: Question, max_positions: int) -> Question:
    room = max_positions - (max(map(len, question.answers)) - 1)
    if room < 1:
        raise ConfigError(f"An answer of {max(map(len, question.answers))} tokens exceeds the model's {max_positions}.")
    return Question(question.context[-room:], question.answers)


def _score_on(model: Decoder, batch: Numbered) -> list[list[AnswerScore]]:
    weight = model.lm_head.weight
    return score_batch(model, lambda: nullcontext(weight), weight.device, [question for _, question in batch])


@torch.no_grad()
def score_batch(
    forward: Callable[..., Tensor],
    head: Callable[[], AbstractContextManager[Tensor]],
    device: torch.device,
    questions: Sequence[Question],
) -> list[list[AnswerScore]]:
    """Scores of questions in one forward pass. forward: a Decoder on the device, or an engine around it. head: gives
    the weight of its head, (V, D), for as long as it is used, which ZeRO-3 brings together for it."""
    row = _row(questions)
    ids, positions = (torch.tensor([values], device=device) for values in (row.ids, row.positions))
    # The first tokens of a question's answers are predicted from one place, so its logits are computed once.
    places, rows = np.unique(row.predict_at, return_inverse=True)  # (M,) and (N,)
    attend, attend_last = group_attention(row), group_attention(row, places)
    at = on_device(places, device)
    hidden = forward(ids, positions, want="hidden", attend=attend, attend_last=attend_last, places=at)[0]  # (M, D)
    with head() as weight:
        logprobs, greedy = _score_targets(weight, hidden, torch.from_numpy(rows), torch.tensor(row.targets))
    return _collect(questions, logprobs, greedy)


def _score_targets(weight: Tensor, hidden: Tensor, rows: Tensor, targets: Tensor) -> tuple[list[float], list[bool]]:
    """Logprob of each target, and whether it is the likeliest token. weight: (V, D). hidden: (M, D). rows: (N,) int64,
    which hidden state predicts it. targets: (N,) int64. Both are on the host."""
    size = max(1, MAX_LOGITS[weight.device.type] // len(weight))
    logprobs, greedy = torch.empty(len(targets)), torch.empty(len(targets), dtype=torch.bool)
    for start in range(0, len(hidden), size):
        logits = times_transposed(hidden[start : start + size], weight)  # (n, V)
        chosen = ((rows >= start) & (rows < start + size)).nonzero()[:, 0]
        places, wanted = (rows[chosen] - start).to(logits.device), targets[chosen].to(logits.device)
        likeliest, logsumexp = _of_rows(logits)
        logprobs[chosen] = (logits[places, wanted].float() - logsumexp[places]).cpu()
        greedy[chosen] = (likeliest[places] == wanted).cpu()
    return logprobs.tolist(), greedy.tolist()


def _of_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row of logits (n, V), (n,) int64, and its logsumexp, (n,) float32."""
    if cpu_head.can_score(logits):
        return cpu_head.likeliest(logits)
    return logits.argmax(-1), logits.float().logsumexp(-1)


@dataclass(frozen=True)
class _Row:
    """Questions one after the other, each a context, with what all its answers begin with, and the rest of its answers:
    a GroupedRow (nanodag.model.group_attention). predict_at: place that predicts each scored token. targets: these
    tokens."""

    ids: list[int]
    positions: list[int]
    prompts: np.ndarray
    responses: np.ndarray
    predict_at: list[int]
    targets: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


def _row(questions: Sequence[Question]) -> _Row:
    ids: list[int] = []
    positions: list[int] = []
    predict_at: list[int] = []
    targets: list[int] = []
    prompts: list[tuple[int, int]] = []
    responses: list[tuple[int, int, int]] = []
    for number, question in enumerate(questions):
        shared = question.shared
        before = len(question.context) + shared
        prompts.append((len(ids), before))
        ids += (*question.context, *question.answers[0][:shared])
        positions += range(before)
        end = len(ids)
        behind: list[tuple[int, int, int]] = []
        for answer in question.answers:
            size = len(answer) - 1 - shared
            behind.append((len(ids), size, number))
            predict_at += [*range(end - 1 - shared, end), *range(len(ids), len(ids) + size)]
            targets += answer
            ids += answer[shared:-1]
            positions += range(before, before + size)
        responses += [response for response in behind if response[1]] or behind[:1]  # nothing is read
    return _Row(ids, positions, np.array(prompts), np.array(responses), predict_at, targets)


def _collect(questions: Sequence[Question], logprobs: list[float], greedy: list[bool]) -> list[list[AnswerScore]]:
    scores: list[list[AnswerScore]] = []
    start = 0
    for question in questions:
        scores.append([])
        for answer in question.answers:
            end = start + len(answer)
            scores[-1].append(AnswerScore(sum(logprobs[start:end]), all(greedy[start:end])))
            start = end
    return scores
