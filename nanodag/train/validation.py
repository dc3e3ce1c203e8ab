"""Looks at the weights under training: loss on held-out text, in nats a token and in bits a byte; CORE, by all ranks,
on the model as it lies in memory; and a few greedy continuations, so that a person sees what the model has learned."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanodag.data.core_tasks import TASKS, read_items
from nanodag.model.core_scoring import CHUNK_ITEMS, judge_items
from nanodag.model.decoder import Decoder
from nanodag.model.scoring import AnswerScore, Question, batch_of, in_batches, score_batch
from nanodag.tokenizer.encoding import Encoding
from nanodag.train.deepspeed_engine import TrainEngine
from nanodag.train.objective import to_device
from nanodag.train.packing import Batch
from nanodag.worker.job import stop_requested

EMPTY = batch_of([(-1, Question((0,), ((0,),)))])
"""A batch of a rank that has no more, for under ZeRO-3 all ranks go through the model together."""

NUM_NEW_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class ValidationLoss:
    """loss: nats a label. bits_per_byte: over the bytes that the labels spell, so vocabularies can be compared. Special
    tokens spell none. For documents these are the bytes of the text, without those that a tokenizer puts before it."""

    loss: float
    bits_per_byte: float


class Validation:
    """A fixed part of the held-out data, the same at every call.

    batches: this rank's. token_bytes: (V,) int32, bytes of each token. All ranks take the same number of forward
    passes.
    """

    def __init__(self, engine: TrainEngine, batches: list[Batch], empty: Batch, token_bytes: Tensor) -> None:
        self._engine = engine
        self._token_bytes = token_bytes.to(engine.device)
        longest = int(engine.highest(len(batches)))
        self._batches = batches + [empty] * (longest - len(batches))

    @torch.no_grad()
    def score(self) -> ValidationLoss:
        """The score of the current weights."""
        engine = self._engine
        totals = torch.zeros(
            4, dtype=torch.float64, device=engine.device
        )  # nats, labels, nats of labels with bytes, bytes
        for batch in self._batches:
            moved = to_device(batch, engine.device)
            logprobs, _ = engine(
                moved.input_ids, moved.position_ids, targets=moved.labels, want="logprobs", attend=moved.attend
            )
            num_bytes = self._token_bytes[moved.labels[moved.labels >= 0]]
            nats = -logprobs.double()
            totals += torch.stack(
                [
                    nats.sum(),
                    nats.new_tensor(nats.numel()),
                    nats[num_bytes > 0].sum(),
                    num_bytes.sum().double() - batch.surplus_bytes,
                ]
            )
        nats_sum, labels, byte_nats, byte_count = engine.summed(*totals.tolist())
        bits_per_byte = byte_nats / math.log(2) / max(byte_count, 1.0)
        return ValidationLoss(loss=nats_sum / max(labels, 1.0), bits_per_byte=bits_per_byte)


class CoreScore:
    """Each rank answers its share of every task's items; it draws no random number and changes no weight.

    files: of each task, by its name. limit: items a task, 0 for all. batch_tokens: that a rank's forward pass reads at
    once, as far as one row is no longer.
    """

    def __init__(
        self,
        engine: TrainEngine,
        model: Decoder,
        encoding: Encoding,
        files: Mapping[str, Path],
        *,
        limit: int,
        batch_tokens: int,
    ) -> None:
        self._engine, self._model, self._encoding, self._files = engine, model, encoding, files
        self._limit, self._batch_tokens = limit, batch_tokens
        self._max_positions = model.architecture.max_positions

    def score(self, on_task: Callable[[int], None] = lambda done: None) -> dict[str, float] | None:
        """The accuracy of each task by its label, the same on every rank; None once a stop was asked for on any.

        All ranks must call it. on_task gets the number of tasks that are done.
        """
        rank, world = self._engine.rank, self._engine.world_size
        accuracies: dict[str, float] = {}
        for done, task in enumerate(TASKS):
            on_task(done)
            data = read_items(self._files[task.file], self._limit)
            num_right = 0
            for start in range(0, len(data), CHUNK_ITEMS * world):
                if self._engine.highest(stop_requested()):
                    return None
                mine = range(start + rank, min(start + CHUNK_ITEMS * world, len(data)), world)
                judged = judge_items(self._answers, self._document, self._max_positions, task, data, mine)
                num_right += sum(item.is_right for item in judged)
            accuracies[task.label] = self._engine.summed(num_right)[0] / len(data)
        on_task(len(TASKS))
        return accuracies

    def _document(self, text: str) -> list[int]:
        """Token ids as in an eval stage: with bos in front where the tokenizer has one."""
        ids = self._encoding.encode(text)
        return [self._encoding.bos_id, *ids] if self._encoding.settings.get("bos_token") is not None else ids

    def _answers(self, questions: Sequence[Question]) -> list[list[AnswerScore]]:
        engine, head = self._engine, self._model.lm_head
        batches = in_batches(questions, micro_batch_tokens=self._batch_tokens, max_positions=self._max_positions)
        scores: list[list[AnswerScore]] = [[] for _ in questions]
        for number in range(int(engine.highest(len(batches)))):
            batch = batches[number] if number < len(batches) else EMPTY
            batch_scores = score_batch(engine, lambda: engine.whole(head.weight), engine.device, batch)
            for (index, _), row_scores in zip(batch.questions, batch_scores, strict=True):
                if index >= 0:
                    scores[index] = row_scores
        return scores


@torch.no_grad()
def greedy(
    model: Any, prompts: Sequence[Sequence[int]], *, stop_ids: frozenset[int], device: torch.device
) -> list[list[int]]:
    """New tokens of each prompt, at most NUM_NEW_TOKENS, without the stop token.

    The whole row is computed again for each token: for a few short prompts that is cheaper than a cache is complicated.
    Every rank must call it with the same prompts.
    """
    outputs = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(NUM_NEW_TOKENS):
            row = torch.tensor([ids], device=device)
            logits = model(row, torch.arange(len(ids), device=device)[None], torch.zeros_like(row), want="logits")
            token = int(logits[0, -1].argmax())
            if token in stop_ids:
                break
            ids.append(token)
        outputs.append(ids[len(prompt) :])
    return outputs


class Uncompiled:
    """Inside this block a decoder runs without compiled code: for shapes that come once, compiling costs more than it
    saves."""

    def __init__(self, model: Decoder, *, active: bool = True) -> None:
        self._model, self._active = model, active

    def __enter__(self) -> None:
        self._kept = self._model.functions.compiled
        self._model.functions.compiled = self._kept and not self._active

    def __exit__(self, *error: object) -> None:
        self._model.functions.compiled = self._kept
