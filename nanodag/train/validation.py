"""Looks at the weights under training: loss on held-out text, in nats a token and in bits a byte; CORE, by all ranks,
on the model as it lies in memory; benchmarks, by the worker of an eval stage; and a few greedy continuations, so that a
person sees what the model has learned."""

import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanodag.config.derive_sampler import derive_evaluation, this_machine
from nanodag.data.core_tasks import TASKS, read_items
from nanodag.model.core_scoring import CHUNK_ITEMS, judge_items
from nanodag.model.decoder import Decoder
from nanodag.model.folder import CausalModel
from nanodag.model.scoring import AnswerScore, Question, batch_of, in_batches, score_batch
from nanodag.sampler.device import give_back
from nanodag.tokenizer.encoding import Encoding
from nanodag.train.deepspeed_engine import TrainEngine
from nanodag.train.objective import Objective, means_of, to_device
from nanodag.train.packing import Batch
from nanodag.train.sequence_parallel import ALONE, SequenceGroup
from nanodag.worker.job import Job, stop_requested
from nanodag.worker.launch import Watch, run_worker

if TYPE_CHECKING:
    from nanodag.train.setup import PreparedStage

EMPTY = batch_of([(-1, Question((0,), ((0,),)))])
"""A batch of a rank that has no more, for under ZeRO-3 all ranks go through the model together."""

NUM_NEW_TOKENS = 32
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class ValidationLoss:
    """loss: of the objective; nats a label. metrics: what else is known of it, by name. `bits_per_byte`: over the bytes
    that the labels spell, so vocabularies can be compared. Special tokens spell none. For documents these are the bytes
    of the text, without those that a tokenizer puts before it."""

    loss: float
    metrics: Mapping[str, float]


@torch.no_grad()
def score_objective(engine: TrainEngine, objective: Objective, batches: Sequence[Batch]) -> ValidationLoss:
    """The objective's mean over held-out batches, and the means of what it reports. All ranks take as many batches."""
    totals = Counter({"loss": 0.0, "count": 0.0})
    for batch in batches:
        loss, sums = objective.loss(engine, batch)
        totals.update({"loss": float(loss), "count": objective.count(batch)})
        totals.update({name: float(value) for name, value in sums.items()})
    summed = dict(zip(totals, engine.summed(*totals.values()), strict=True))
    means = means_of(summed, summed.pop("count"))
    return ValidationLoss(loss=means.pop("loss"), metrics=means)


@torch.no_grad()
def score_text(
    engine: TrainEngine, token_bytes: Tensor, batches: Sequence[Batch], group: SequenceGroup = ALONE
) -> ValidationLoss:
    """The mean of the next token's loss over held-out batches, and its bits a byte. token_bytes: (V,) int32 on the
    engine's device, bytes of each token. All ranks take as many batches. group: of the ranks that share them."""
    # nats, labels, nats of labels with bytes, bytes
    totals = torch.zeros(4, dtype=torch.float64, device=engine.device)
    for batch in batches:
        moved = to_device(batch, engine.device, group)
        logprobs, _ = engine(
            moved.input_ids, moved.position_ids, targets=moved.labels, want="logprobs", attend=moved.attend
        )
        num_bytes = token_bytes[moved.labels[moved.labels >= 0]]
        nats = -logprobs.double()
        text_bytes = num_bytes.sum().double() - group.counted(batch.surplus_bytes)[0]
        totals += torch.stack([nats.sum(), nats.new_tensor(nats.numel()), nats[num_bytes > 0].sum(), text_bytes])
    nats_sum, labels, byte_nats, byte_count = engine.summed(*totals.tolist())
    bits_per_byte = byte_nats / math.log(2) / max(byte_count, 1.0)
    return ValidationLoss(loss=nats_sum / max(labels, 1.0), metrics={"bits_per_byte": bits_per_byte})


def core_accuracies(
    engine: TrainEngine,
    model: CausalModel,
    encoding: Encoding,
    files: Mapping[str, Path],
    *,
    limit: int,
    batch_tokens: int,
    on_task: Callable[[int], None],
) -> dict[str, float] | None:
    """The accuracy of each of CORE's tasks by its label, the same on every rank; None once a stop was asked for on any.

    All ranks must call it, and each answers its share of every task's items; it draws no random number and changes no
    weight. files: of each task, by its name. limit: items a task, 0 for all. batch_tokens: that a rank's forward pass
    reads at once, as far as one row is no longer. on_task gets the number of tasks that are done.
    """
    max_positions, head = model.architecture.max_positions, model.lm_head
    # As in an eval stage: with bos in front where the tokenizer has one.
    begin = [encoding.bos_id] if encoding.settings.get("bos_token") is not None else []

    def document(text: str) -> list[int]:
        return [*begin, *encoding.encode(text)]

    def answers(questions: Sequence[Question]) -> list[list[AnswerScore]]:
        batches = in_batches(questions, micro_batch_tokens=batch_tokens, max_positions=max_positions)
        scores: list[list[AnswerScore]] = [[] for _ in questions]
        for number in range(int(engine.highest(len(batches)))):
            batch = batches[number] if number < len(batches) else EMPTY
            batch_scores = score_batch(engine, lambda: engine.whole(head.weight), engine.device, batch, head.cap)
            for (index, _), row_scores in zip(batch.questions, batch_scores, strict=True):
                if index >= 0:
                    scores[index] = row_scores
        return scores

    rank, world = engine.rank, engine.world_size
    accuracies: dict[str, float] = {}
    for done, task in enumerate(TASKS):
        on_task(done)
        data = read_items(files[task.file], limit)
        num_right = 0
        for start in range(0, len(data), CHUNK_ITEMS * world):
            if engine.highest(stop_requested()):
                return None
            mine = range(start + rank, min(start + CHUNK_ITEMS * world, len(data)), world)
            num_right += sum(item.is_right for item in judge_items(answers, document, max_positions, task, data, mine))
        accuracies[task.label] = engine.summed(num_right)[0] / len(data)
    on_task(len(TASKS))
    return accuracies


def ask_benchmarks(stage: "PreparedStage", step: int, write: Callable[..., None]) -> dict[str, float] | None:
    """The main score of each benchmark of the stage, the same on every rank; None once a stop was asked for. It is that
    of an eval stage, whose own worker asks a folder of the weights as they are; nothing in the trainer's process
    changes, no random number either.

    All ranks must call it, and wait for rank 0's worker. write: MetricsLog's; it gets a line for each benchmark, whose
    items stay in the stage's records, benchmarks/step-STEP.NAME.jsonl. Raises StageFailed where the worker failed.
    """
    engine, workspace, began = stage.engine, stage.job.workspace / "asked", time.monotonic()
    if engine.highest(stop_requested()) > 0:
        return None
    if engine.rank == 0:
        shutil.rmtree(workspace, ignore_errors=True)  # of a process that was killed here
        (workspace / "model").mkdir(parents=True)
    engine.barrier()
    stage.export(workspace / "model", whole=True)
    give_back(engine.device)  # what a step's activations took, for the worker

    def tell(line: dict[str, Any]) -> None:
        if line["event"] == "phase":
            told = {name: line[name] for name in ("event", "phase", "done", "of", "unit")}
            write(step, total=stage.num_steps, **told)

    watch = Watch(on_metrics=tell)
    with ThreadPoolExecutor(1) as executor:
        worker = executor.submit(run_worker, _job(stage, workspace), watch=watch) if engine.rank == 0 else None
        try:
            while engine.highest(worker is not None and not worker.done()) > 0:
                if engine.highest(stop_requested()) > 0:
                    watch.stop.set()
                time.sleep(POLL_S)
        finally:
            watch.stop.set()  # where a rank is lost too: the executor waits for the worker
    if engine.highest(stop_requested()) > 0:
        return None
    results: dict[str, Any] = {}
    if worker is not None:
        worker.result()
        results = json.loads((workspace / "output" / "results.json").read_text(encoding="utf-8"))["benchmarks"]
        kept = stage.job.records / "benchmarks"
        kept.mkdir(parents=True, exist_ok=True)
        for path in (workspace / "output" / "samples").glob("*.jsonl"):
            os.replace(path, kept / f"step-{step:08d}.{path.name}")
        shutil.rmtree(workspace)
    results = engine.gathered(results)[0]
    told = ("metric", "higher_is_better", "low", "high", "too_long", "unparsed", "truncated")
    for name, result in results.items():
        values = {f"benchmark_{name}": result["value"], f"benchmark_{name}_stderr": result["stderr"]}
        values |= {key: result[key] for key in told} | {"seconds_evaluate": time.monotonic() - began}
        write(step, total=stage.num_steps, event="eval", benchmark=name, **values)
    return {name: result["value"] for name, result in results.items()}


def _job(stage: "PreparedStage", workspace: Path) -> Job:
    job, asked = stage.job, stage.config.own_evaluation("model")
    assert asked is not None
    return Job(
        name=job.name,  # which advice on how to go on names
        run=job.run,
        config=derive_evaluation(job.name, asked, this_machine(), None, {}),
        inputs={"model": workspace / "model"},
        workspace=workspace,
        context={**job.context, "tracking": {}, "waited_for": True},
    )


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


@contextmanager
def uncompiled(model: CausalModel, *, active: bool = True) -> Iterator[None]:
    """Inside this block a decoder runs uncompiled: for shapes that come once, compiling costs more than it saves."""
    if not isinstance(model, Decoder):
        yield
        return
    compiled = model.functions.compiled
    model.functions.compiled = compiled and not active
    try:
        yield
    finally:
        model.functions.compiled = compiled
