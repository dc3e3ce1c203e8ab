"""Log-probabilities of answers under a model, a question's context computed once for all its answers.

Letters: T tokens of a batch, N scored tokens, M places that predict them, S sequences, D model width, V vocabulary.

Whatever questions and answers begin with is read once a batch: a context for all its answers, examples for all
questions behind them. Their tokens make a tree, whose sequences lie one after the other in one row, without padding
(nanodag.model.attention). Four choices of 5 tokens behind a context of 30 cost 46 tokens instead of 136, of one token
nothing beyond the context. But for keys and values the last layer is computed at places that predict.
"""

import itertools
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

from nanodag.config.footprint import MAX_LOGITS
from nanodag.errors import ConfigError, TrainingDiverged
from nanodag.model.attention import Packed, on_device
from nanodag.model.cpu_linear import times_transposed
from nanodag.model.folder import CausalModel
from nanodag.model.head import likeliest
from nanodag.model.scorer import Scorer
from nanodag.model.transformers_class import capped
from nanodag.store.kept_lines import KeptLines, content_key

WORTH_SHARING = 16
"""Tokens that questions begin with, from which on they are read once: our attention's threads share out whole trees."""
KEYS_A_TOKEN = 8
"""Keys that the sequences of a batch may see, all together, for each of its tokens: on a GPU all are laid out."""


@dataclass(frozen=True)
class Question:
    """Token ids. context: at least one. answers: at least one, of at least one token each."""

    context: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens that go through the model where nothing is shared with other questions: an answer's last token is
        predicted, never read, and what all answers begin with is read once."""
        sizes = [len(answer) - 1 for answer in self.answers]
        shared = min(num_common(self.answers), *sizes)
        return len(self.context) + shared + sum(size - shared for size in sizes)

    @property
    def num_seen(self) -> int:
        """About how many keys its tokens' sequences see."""
        longest = len(self.context) + max(map(len, self.answers)) - 1
        return longest * (1 + sum(len(answer) > 1 for answer in self.answers))

    def fits(self, max_positions: int) -> bool:
        """True where the context leaves room for the longest answer."""
        return len(self.context) + max(map(len, self.answers)) - 1 <= max_positions


@dataclass(frozen=True)
class AnswerScore:
    """logprob: natural log, summed over the answer's tokens. is_greedy: each of them was the most likely one."""

    logprob: float
    is_greedy: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class QuestionBatch:
    """Questions with their numbers, and the row that they make.

    ids, positions: (T,) int64. sequences: (S, 3) int64, as nanodag.model.attention has them. predict_at, targets:
    (N,) int64, the place that predicts each scored token, question by question and answer by answer; and these tokens.
    """

    questions: list[tuple[int, Question]]
    ids: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray
    predict_at: np.ndarray
    targets: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.ids)


def score_questions(
    models: Sequence[CausalModel],
    questions: Sequence[Question],
    *,
    micro_batch_tokens: int,
    max_positions: int,
    on_batch: Callable[[int, int], None] = lambda done, num_tokens: None,
    kept: KeptLines | None = None,
) -> list[list[AnswerScore]]:
    """Scores of every answer of every question, in the order given.

    models: of the same weights, each on a device of its own; whichever is free takes the next batch.
    micro_batch_tokens: at once; a question that is longer goes alone. max_positions: a context that leaves its longest
    answer no room loses tokens at its front. on_batch gets the number of questions done, and of tokens that a batch
    has, computed now or before. kept: batches that are done, and where others are kept. A batch is kept whole: in
    another one scores could be rounded otherwise.

    Raises ConfigError for an answer that alone is longer than max_positions, TrainingDiverged for numbers not finite.
    """
    batches = in_batches(questions, micro_batch_tokens=micro_batch_tokens, max_positions=max_positions)
    scores: list[list[AnswerScore]] = [[] for _ in questions]
    known = [None if kept is None else kept.get(_key(batch)) for batch in batches]
    computed = _each_batch(models, [batch for batch, rows in zip(batches, known, strict=True) if rows is None])
    num_done = 0
    for batch, before in zip(batches, known, strict=True):
        if before is not None:
            rows = [[AnswerScore(*answer) for answer in row] for row in before]
        else:
            rows = next(computed)
            if not all(math.isfinite(answer.logprob) for row in rows for answer in row):
                raise TrainingDiverged(
                    "The model's log-probabilities are not finite: its weights have diverged or are damaged, so there "
                    "is nothing to score. Evaluate an earlier checkpoint, or train it again with a lower rate."
                )
            if kept is not None:
                kept.add({_key(batch): [[(answer.logprob, answer.is_greedy) for answer in row] for row in rows]})
        for (index, _), row_scores in zip(batch.questions, rows, strict=True):
            scores[index] = row_scores
        num_done += len(batch.questions)
        on_batch(num_done, batch.num_tokens)
    return scores


@torch.no_grad()
def scores_at(
    scorer: Scorer, asked: Sequence[tuple[Sequence[int], Sequence[int]]], *, batch_tokens: int
) -> list[list[float]]:
    """Scores by a reward model (nanodag.model.scorer) of texts, at some places of each: token ids and ascending places.
    Texts are packed, what they begin with alike read once."""
    scores: list[list[float]] = [[] for _ in asked]
    # A score is read where a token is predicted: another one stands behind the last.
    questions = [Question(tuple(ids[: at[0] + 1]), ((*ids[at[0] + 1 :], 0),)) for ids, at in asked]
    longest = max((len(ids) for ids, _ in asked), default=0)
    for batch in in_batches(questions, micro_batch_tokens=batch_tokens, max_positions=longest) if asked else ():
        arrays = (batch.ids, batch.positions, batch.predict_at)
        ids, positions, at = (on_device(array, scorer.score.weight.device) for array in arrays)
        found = scorer(ids[None], positions[None], places=at, attend=Packed(batch.sequences)).tolist()
        for number, question in batch.questions:
            _, places = asked[number]
            scores[number] = [found[place - places[0]] for place in places]
            found = found[len(question.answers[0]) :]
    return scores


def in_batches(questions: Sequence[Question], *, micro_batch_tokens: int, max_positions: int) -> list[QuestionBatch]:
    """Sort questions, those that begin alike beside one another, into batches of at most micro_batch_tokens; one that
    is longer comes with those alone that share most of it. The largest batch comes first: an out-of-memory at once.
    Contexts are cut as in `score_questions`, which says what is raised."""
    fitted = [_fit(question, max_positions) for question in questions]
    batches: list[list[tuple[int, Question]]] = []
    size = num_seen = longest = 0
    for number in _order(fitted):
        question = fitted[number]
        shared = _num_shared(batches[-1][-1][1], question) if batches else 0
        own = question.num_tokens - shared
        room = micro_batch_tokens if own > shared else max(micro_batch_tokens, longest + micro_batch_tokens // 2)
        if not batches or size + own > room or num_seen + question.num_seen > KEYS_A_TOKEN * room:
            batches.append([])
            size, num_seen, longest, own = 0, 0, question.num_tokens, question.num_tokens
        batches[-1].append((number, question))
        size, num_seen = size + own, num_seen + question.num_seen
    return sorted(map(batch_of, batches), key=lambda batch: -batch.num_tokens)


def _order(questions: Sequence[Question]) -> Iterator[int]:
    """Numbers of the questions: those that begin alike beside one another, else by their length, as some ways of
    attention fill the rows of a batch up to the longest."""
    groups: list[list[int]] = []
    for number in sorted(range(len(questions)), key=lambda i: (questions[i].context, i)):
        if groups and _num_shared(questions[groups[-1][-1]], questions[number]):
            groups[-1].append(number)
        else:
            groups.append([number])
    groups.sort(key=lambda group: max(questions[number].num_tokens for number in group))
    return itertools.chain.from_iterable(groups)


def _num_shared(one: Question, other: Question) -> int:
    """Tokens that two questions of a batch begin with, where these are worth to be read once."""
    common = num_common([one.context, other.context])
    return common if common >= WORTH_SHARING else 0


def num_common(sequences: Sequence[tuple[int, ...]]) -> int:
    """Number of tokens that all sequences begin with."""
    one, other = min(sequences), max(sequences)  # what these two have in common all do
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _key(batch: QuestionBatch) -> str:
    return content_key("scored", [[question.context, question.answers] for _, question in batch.questions])


def _each_batch(models: Sequence[CausalModel], batches: Sequence[QuestionBatch]) -> Iterator[list[list[AnswerScore]]]:
    """The scores of each batch, in order. A thread a model: it waits for its device most of the time."""
    if len(models) == 1:
        yield from (_score_on(models[0], batch) for batch in batches)
        return
    free: SimpleQueue[CausalModel] = SimpleQueue()
    for model in models:
        free.put(model)

    def score(batch: QuestionBatch) -> list[list[AnswerScore]]:
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


def _score_on(model: CausalModel, batch: QuestionBatch) -> list[list[AnswerScore]]:
    weight = model.lm_head.weight
    return score_batch(model, lambda: nullcontext(weight), weight.device, batch, model.lm_head.cap)


@torch.no_grad()
def score_batch(
    forward: Callable[..., Tensor],
    head: Callable[[], AbstractContextManager[Tensor]],
    device: torch.device,
    batch: QuestionBatch,
    cap: float | None,
) -> list[list[AnswerScore]]:
    """Scores of a batch's questions in one forward pass. forward: a Decoder on the device, or an engine around it.
    head: gives the weight of its head, (V, D), for as long as it is used, which ZeRO-3 brings together for it. cap: the
    head's."""
    ids, positions = (on_device(values, device)[None] for values in (batch.ids, batch.positions))
    # What is predicted from one place has its logits computed once.
    places, rows = np.unique(batch.predict_at, return_inverse=True)  # (M,) and (N,)
    attend, attend_last = Packed(batch.sequences), Packed(batch.sequences, places)
    at = on_device(places, device)
    hidden = forward(ids, positions, want="hidden", attend=attend, attend_last=attend_last, places=at)[0]  # (M, D)
    with head() as weight:
        logprobs, greedy = _score_targets(weight, hidden, torch.from_numpy(rows), torch.from_numpy(batch.targets), cap)
    scores: list[list[AnswerScore]] = []
    start = 0
    for _, question in batch.questions:
        scores.append([])
        for answer in question.answers:
            end = start + len(answer)
            scores[-1].append(AnswerScore(sum(logprobs[start:end]), all(greedy[start:end])))
            start = end
    return scores


def _score_targets(
    weight: Tensor, hidden: Tensor, rows: Tensor, targets: Tensor, cap: float | None
) -> tuple[list[float], list[bool]]:
    """Logprob of each target, and whether it is the likeliest token. weight: (V, D). hidden: (M, D). rows: (N,) int64,
    which hidden state predicts it. targets: (N,) int64. Both are on the host."""
    size = max(1, MAX_LOGITS[weight.device.type] // len(weight))
    logprobs, greedy = torch.empty(len(targets)), torch.empty(len(targets), dtype=torch.bool)
    for start in range(0, len(hidden), size):
        logits = capped(times_transposed(hidden[start : start + size], weight), cap)  # (n, V)
        chosen = ((rows >= start) & (rows < start + size)).nonzero()[:, 0]
        places, tokens = (rows[chosen] - start).to(logits.device), targets[chosen].to(logits.device)
        first, logsumexp = likeliest(logits)
        logprobs[chosen] = (logits[places, tokens].float() - logsumexp[places]).cpu()
        greedy[chosen] = (first[places] == tokens).cpu()
    return logprobs.tolist(), greedy.tolist()


def batch_of(questions: list[tuple[int, Question]]) -> QuestionBatch:
    """Questions with their numbers as one row: a tree of those that begin alike, each beside the next one."""
    reads: list[tuple[int, int, tuple[int, ...]]] = []  # number of the tree, first token that predicts, what is read
    tree, before = 0, questions[0][1]
    for _, question in questions:
        tree += question is not before and not _num_shared(before, question)
        reads += [(tree, len(question.context) - 1, (*question.context, *answer[:-1])) for answer in question.answers]
        before = question
    texts = sorted({(tree, read) for tree, _, read in reads})
    parts, part_of = _parts(texts)
    starts = np.cumsum([0, *(end - begin for _, begin, end, _ in parts)])
    number_of = dict(zip(texts, part_of, strict=True))
    predict_at = [
        place for tree, first, read in reads for place in _places(parts, starts, number_of[tree, read], first)
    ]
    return QuestionBatch(
        questions=questions,
        ids=np.concatenate([np.array(texts[text][1][begin:end]) for text, begin, end, _ in parts]),
        positions=np.concatenate([np.arange(begin, end) for _, begin, end, _ in parts]),
        sequences=np.array(
            [(start, part[2] - part[1], part[3]) for start, part in zip(starts[:-1], parts, strict=True)]
        ),
        predict_at=np.array(predict_at),
        targets=np.array([token for _, question in questions for answer in question.answers for token in answer]),
    )


Part = tuple[int, int, int, int]
"""Tokens of a text that the same texts have in common: its number, from which place on, up to which; and the number of
the part that this one goes on from, -1 for none."""


def _parts(texts: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[list[Part], list[int]]:
    """Texts in ascending order, all different, each behind its tree's number, as the parts that those of a tree share,
    in the order of a walk down; and the last part of each."""
    common = [0]
    for (tree, text), (other_tree, other) in itertools.pairwise(texts):
        common.append(num_common([text, other]) if tree == other_tree else 0)
    parts: list[Part] = []
    last = [-1] * len(texts)
    below = [(0, len(texts), 0, -1)]  # texts from one up to another; how much of them is in parts; the last of these
    while below:
        first, end, done, behind = below.pop()
        size = len(texts[first][1])
        upto = min(common[first + 1 : end], default=size)
        if upto > done:
            parts.append((first, done, upto, behind))
            behind = len(parts) - 1
        if size == upto:
            last[first] = behind
            first += 1
        cuts = [first, *(i for i in range(first + 1, end) if common[i] == upto), end]
        below += [(begin, stop, upto, behind) for begin, stop in itertools.pairwise(cuts) if begin < stop][::-1]
    return parts, last


def _places(parts: Sequence[Part], starts: np.ndarray, number: int, first: int) -> list[int]:
    """Places of the tokens of a text, from its token `first` on. number: its last part. starts: of each part."""
    runs: list[range] = []
    while True:
        _, begin, end, behind = parts[number]
        start = int(starts[number])
        runs.append(range(start + max(first - begin, 0), start + end - begin))
        if begin <= first:
            return [place for places in reversed(runs) for place in places]
        number = behind
