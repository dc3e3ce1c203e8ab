"""CORE of the weights under training, by all ranks, on the model as it lies in memory."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nanodag.data.core_tasks import TASKS, read_items
from nanodag.model.core_scoring import CHUNK_ITEMS, judge_items
from nanodag.model.decoder import Decoder
from nanodag.model.scoring import AnswerScore, Question, batch_of, in_batches, score_batch
from nanodag.tokenizer.encoding import Encoding
from nanodag.train.deepspeed_engine import TrainEngine
from nanodag.worker.job import stop_requested

EMPTY = batch_of([(-1, Question((0,), ((0,),)))])
"""A batch of a rank that has no more, for under ZeRO-3 all ranks go through the model together."""


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
                num_right += sum(one.is_right for one in judged)
            accuracies[task.label] = self._engine.summed(num_right)[0] / len(data)
        on_task(len(TASKS))
        return accuracies

    def _document(self, text: str) -> list[int]:
        """As an eval stage begins a text: with bos where the tokenizer has one."""
        ids = self._encoding.encode(text)
        return [self._encoding.bos_id, *ids] if self._encoding.settings.get("bos_token") is not None else ids

    def _answers(self, questions: Sequence[Question]) -> list[list[AnswerScore]]:
        engine, head = self._engine, self._model.lm_head
        batches = in_batches(questions, micro_batch_tokens=self._batch_tokens, max_positions=self._max_positions)
        scores: list[list[AnswerScore]] = [[] for _ in questions]
        for number in range(int(engine.highest(len(batches)))):
            batch = batches[number] if number < len(batches) else EMPTY
            found = score_batch(engine, lambda: engine.whole(head.weight), engine.device, batch)
            for (index, _), row_scores in zip(batch.questions, found, strict=True):
                if index >= 0:
                    scores[index] = row_scores
        return scores
