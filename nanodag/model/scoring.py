"""Log-probabilities of answers under a model, a question's context computed once for all its answers.

Shapes: B rows of a batch, T tokens of its longest row, N scored tokens, D model width, V vocabulary.

A question with the context c and the answers x and y becomes one row, c x y: answer tokens see the context and their
own answer only, and their positions go on from the context's. Four choices of 5 tokens behind a context of 30 cost 46
tokens instead of 136. One-token answers cost nothing beyond the context.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanodag.errors import ConfigError, TrainingDiverged
from nanodag.model.attention import Attend
from nanodag.model.decoder import Decoder
from nanodag.store.kept_lines import KeptLines, content_key

MAX_LOGITS = 1 << 25  # numbers of one slice of (N, V): 128 MB in fp32


@dataclass(frozen=True)
class Question:
    """Token ids. context: at least one. answers: at least one, of at least one token each."""

    context: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model: an answer's last token is predicted, never read."""
        return len(self.context) + sum(len(answer) - 1 for answer in self.answers)

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
    micro_batch_tokens: at once, padding included; a question that is longer goes alone. max_positions: a context that
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
    """All questions with their numbers, in batches of at most micro_batch_tokens, padding included; a row that is
    longer comes alone. Contexts are cut as in `score_questions`, which says what is raised."""
    fitted = [_fit(question, max_positions) for question in questions]
    # Longest first: an out-of-memory comes at once, and rows of one batch are of about one length.
    order = sorted(range(len(fitted)), key=lambda i: (-fitted[i].num_tokens, i))
    batches: list[Numbered] = []
    start = 0
    while start < len(order):
        num_rows = max(1, micro_batch_tokens // fitted[order[start]].num_tokens)
        batches.append([(number, fitted[number]) for number in order[start : start + num_rows]])
        start += num_rows
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
    rows = [_row(question) for question in questions]
    width = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions = torch.zeros(len(rows), width, dtype=torch.long)
    segments = torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        size = len(row.ids)
        ids[number, :size] = torch.tensor(row.ids)
        positions[number, :size] = torch.tensor(row.positions)
        segments[number, :size] = torch.tensor(row.segments)
    hidden = forward(ids.to(device), positions.to(device), want="hidden", attend=_attention(segments.to(device)))
    where = torch.tensor([(b, t) for b, row in enumerate(rows) for t in row.predict_at], device=device)  # (N, 2)
    targets = torch.tensor([token for row in rows for token in row.targets], device=device)  # (N,)
    with head() as weight:
        logprobs, greedy = _score_targets(weight, hidden[where[:, 0], where[:, 1]], targets)
    return _collect(questions, logprobs, greedy)


def _score_targets(weight: Tensor, hidden: Tensor, targets: Tensor) -> tuple[list[float], list[bool]]:
    """Logprob of each target, and whether it is the likeliest token. weight: (V, D). hidden: (N, D). targets: (N,)
    int64."""
    size = max(1, MAX_LOGITS // len(weight))
    logprobs: list[float] = []
    greedy: list[bool] = []
    for start in range(0, len(targets), size):
        wanted = targets[start : start + size]
        logits = (hidden[start : start + size] @ weight.T).float()  # (n, V)
        logprobs += (logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
        greedy += (logits.argmax(-1) == wanted).tolist()
    return logprobs, greedy


@dataclass(frozen=True)
class _Row:
    ids: list[int]
    positions: list[int]
    segments: list[int]  # 0: context, 1..: number of the answer
    predict_at: list[int]  # place in the row that predicts each scored token
    targets: list[int]


def _row(question: Question) -> _Row:
    start = len(question.context)
    row = _Row(list(question.context), list(range(start)), [0] * start, [], [])
    for number, answer in enumerate(question.answers, start=1):
        row.predict_at.append(start - 1)
        row.predict_at.extend(range(len(row.ids), len(row.ids) + len(answer) - 1))
        row.targets.extend(answer)
        row.ids.extend(answer[:-1])
        row.positions.extend(range(start, start + len(answer) - 1))
        row.segments.extend([number] * (len(answer) - 1))
    return row


def _attention(segments: Tensor) -> Attend:
    """A token sees what stands before it in the context and in its own answer. segments: (B, T), 0 for the context.

    Padding stands at the right, where causal rows never look, so only rows with several answers need a mask.
    """
    mask = None
    if bool(segments.any()):
        of_key, of_query = segments[:, None, :], segments[:, :, None]
        mask = (((of_key == 0) | (of_key == of_query)).tril())[:, None]  # (B, 1, T, T)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.transpose(1, 2)

    return attend


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
