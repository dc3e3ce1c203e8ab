"""Samplers' share of busy time with answers of a heavy tail: `python -m benchmarks.pool`.

The schedule, generator and pool of a stage; samplers and trainer are simulated: a sampler's seats write a token each
`--token-ms`, and a step trains for `--train` of the time that its rollouts take. Lengths are log-normal by prompt and
by answer, so that some answers are ten times the mean. A line for each order:

    busy        share of the seats' time in which they wrote
    wall        time of the stage over that of writing all that was sampled with every seat busy
    length      mean length of what was trained over that of what was sampled
    largest     staleness of the oldest token that was trained, in steps; masked: tokens that were older than allowed
    overdue     seconds in which a step had its groups and waited for one that was due

Both `busy` and `wall` have the end of the stage in them, where the last answers are waited for.
"""

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from nanodag.config.kinds.rl import RLStage
from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.inference.protocol import Completion, FinishReason, Request, VersionSpan
from nanodag.rewards.reward import Reward
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.control.pool import RolloutPool
from nanodag.rl.control.schedule import Position, Schedule
from nanodag.rl.rollouts.batch import RolloutBatch, staleness_metrics, without_stale
from nanodag.rl.rollouts.prompts import PolicyFormat, PromptCursor

STOP = 0
MEAN, LONGEST = 100, 1000
SPREAD_OF_PROMPTS, SPREAD_OF_ANSWERS = 0.8, 0.5


@dataclass
class Seats:
    """Samplers that decode so many answers at once, each a token every token_s, whatever the weights."""

    number: int
    token_s: float
    versions: list[tuple[float, int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.number)
        self.busy_s = 0.0

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Answers whose lengths follow from the seed."""
        return [await self._answers(request) for request in requests]

    async def _answers(self, request: Request) -> list[Completion]:
        draw = random.Random(request.params.sampling_seed)
        of_prompt = draw.lognormvariate(0.0, SPREAD_OF_PROMPTS)
        lengths = [of_prompt * draw.lognormvariate(0.0, SPREAD_OF_ANSWERS) for _ in range(request.params.n)]
        return list(await asyncio.gather(*(self._answer(int(min(LONGEST, 2 + MEAN * one))) for one in lengths)))

    async def _answer(self, length: int) -> Completion:
        async with self._free:
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(length * self.token_s)
            ended = asyncio.get_running_loop().time()
        self.busy_s += length * self.token_s
        self.lengths.append(length)
        starts = [int((at - began) / (ended - began) * length) for at, _ in self.versions]
        places = [*(min(max(start, 0), length) for start in starts), length]
        spans = [
            VersionSpan(version=str(version), start=start, end=end)
            for (_, version), (start, end) in zip(self.versions, pairwise(places), strict=True)
            if end > start
        ]
        return Completion(
            rid="r",
            output_ids=[1] * (length - 1) + [STOP],
            logprobs=[-0.5] * length,
            finish_reason=FinishReason(type="stop"),
            weight_version=spans[-1].version,
            weight_versions=spans,
            num_prompt_tokens=1,
        )

    async def abort(self, rid: str) -> None:
        """Nobody is ended."""


class Rewards:
    """1 and 0 in turn: every group has spread."""

    def submit_group(
        self, prompt: Any, completions: Sequence[str], *, reported: Any = ()
    ) -> "list[Future[Reward | str]]":
        futures: list[Future[Reward | str]] = [Future() for _ in completions]
        for number, future in enumerate(futures):
            future.set_result(Reward(float(number % 2)))
        return futures


class Words:
    """A tokenizer that has nothing to say."""

    stop_ids = (STOP,)

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def prompt(self, messages: Any, switches: Any = None, *, tools: Any = ()) -> list[int]:
        return [1]


class Stage:
    """What a schedule asks for. train_s: of a step."""

    def __init__(self, folder: Path, seats: Seats, *, train_s: float, sync_s: float, **config: Any) -> None:
        self.config = RLStage.of(kind="rl", data=["file:x"], seed=1, filters=[], **config)
        self.seats, self.train_s, self.sync_s = seats, train_s, sync_s
        rows = [json.dumps({"prompt": f"{n}", "answer": "", "prompt_id": f"p{n}"}) + "\n" for n in range(500)]
        (folder / "prompts.jsonl").write_text("".join(rows))
        sources = [SourceConfig(url=f"file:{folder}/prompts.jsonl")]
        mixture = Mixture(sources, kind="prompt", seed=0, repeat=True)
        self.cursor = PromptCursor(mixture, PolicyFormat(Words(), {}, ()), longest=10)  # type: ignore[arg-type]
        words: Any = Words()
        self.generator = RolloutGenerator(self.config, seats, Rewards(), words, (STOP,))  # type: ignore[arg-type]
        self.pool: RolloutPool | None = None
        if self.config.rollout.order == "arrival":
            self.pool = RolloutPool(self.generator, self.cursor)
        self.trained: list[RolloutBatch] = []
        self.staleness: list[dict[str, float]] = []

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        yield

    async def load(self, policy: int) -> None:
        await asyncio.sleep(self.sync_s)
        self.seats.versions.append((asyncio.get_running_loop().time(), policy))
        if self.pool is not None:
            self.pool.samplers_have(policy)

    async def generate(self, step: int) -> RolloutBatch:
        return await (self.generator.step(self.cursor, step) if self.pool is None else self.pool.take(step))

    def is_evaluation_due(self, policy: int) -> bool:
        return False

    async def evaluate(self, policy: int) -> None: ...

    async def train(self, step: int, batch: RolloutBatch) -> None:
        versions, largest = list(range(step)), self.config.rollout.max_staleness
        batch = without_stale(batch, versions, largest=largest)
        self.staleness.append(staleness_metrics(batch.trained, versions))
        self.trained.append(batch)
        await asyncio.sleep(self.train_s)

    async def publish(self, policy: int) -> None: ...

    def note(self, step: int) -> None: ...

    def is_checkpoint_due(self, step: int) -> bool:
        return False

    async def save(self, position: Position) -> None: ...

    def check(self) -> None: ...

    def is_stop_requested(self) -> bool:
        return False

    async def run(self) -> dict[str, float]:
        """To its end: what the head of this file says."""
        clock = asyncio.get_running_loop().time
        began, mode = clock(), self.config.weights.sync_mode
        schedule = Schedule(
            self,
            num_steps=self.config.num_steps,
            lag=self.config.rollout.max_staleness,
            is_exact=False,
            begins=Position(),
            timed=self.timed,
            loads_in_flight=mode != "finish",
        )
        await schedule.run()
        wall = clock() - began
        trained = [rollout.num_sampled for batch in self.trained for rollout in batch.trained]
        return {
            "busy": self.seats.busy_s / wall / self.seats.number,
            "wall": wall * self.seats.number / (sum(self.seats.lengths) * self.seats.token_s),
            "length": fmean(trained) / fmean(self.seats.lengths),
            "sampled": len(self.seats.lengths),
            "trained": len(trained),
            "staleness": fmean(values["staleness"] for values in self.staleness),
            "largest": max(values["staleness_largest"] for values in self.staleness),
            "masked": sum(values["masked_tokens"] for values in self.staleness),
            "overdue": sum(batch.pool.get("seconds_overdue", 0.0) for batch in self.trained),
            "groups": sum(len(batch.kept) for batch in self.trained),
        }


async def run(
    order: str,
    staleness: int,
    *,
    steps: int,
    prompts: int = 32,
    samples: int = 8,
    seats: int = 64,
    token_s: float,
    train: float,
) -> dict[str, float]:
    """One stage."""
    batch_s = prompts * samples * 1.45 * MEAN * token_s / seats  # 1.45 times the median, which MEAN is
    mode = "in_place" if staleness else "finish"
    config = {
        "order": order,
        "num_steps": steps,
        "prompts_per_step": prompts,
        "samples_per_prompt": samples,
        "max_new_tokens": LONGEST,
        "max_staleness": staleness,
        "sync_mode": mode,
        "sampler": {"deterministic": False, "max_batch": seats},
    }
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder), Seats(seats, token_s), train_s=train * batch_s, sync_s=0.02 * batch_s, **config)
        return await stage.run()


def main() -> None:
    """Measure each order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--token-ms", type=float, default=4.0)
    parser.add_argument("--train", type=float, default=0.5, help="training time of a step over its generation time")
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    chosen = parser.parse_args()
    for order, staleness in (("prompt", 0), ("prompt", 2), ("arrival", 1), ("arrival", 2), ("arrival", 3)):
        began, cpu = time.monotonic(), time.process_time()
        found = asyncio.run(
            run(
                order,
                staleness,
                steps=chosen.steps,
                prompts=chosen.prompts,
                samples=chosen.samples,
                seats=chosen.seats,
                token_s=chosen.token_ms / 1000,
                train=chosen.train,
            )
        )
        shown = "  ".join(f"{name} {value:.3f}" for name, value in found.items())
        seconds = f"{time.monotonic() - began:.1f} s, CPU {time.process_time() - cpu:.1f} s"
        print(f"{order} max_staleness={staleness}: {shown} ({seconds})", flush=True)


if __name__ == "__main__":
    main()
