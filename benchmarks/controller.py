"""How many rollouts a second the RL controller can carry: `python -m benchmarks.controller`.

Simulated samplers, in processes of their own, answer at once with 1,000 tokens and their log-probabilities over HTTP.
This process is a stage's controller: client, samplers, rewards, judgement, metrics, files and ledger are a stage's own
code. Then it does what a trainer's rank does: reads the file and packs it. It says CPU seconds, as others may use the
machine; rollouts a second are of one core. `--lost` kills so many servers in the midst of a step; each is started
again, and every prompt must be answered once. `--buckets` gives every server weights in so many buckets, twice, by a
stage's own sync: the servers and a trainer's ranks answer at once, so that what it takes is the calls.
"""

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import pstats
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from aiohttp import web

from nanodag.config.kinds.rl import RLStage
from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.engines.fleet import Fleet
from nanodag.errors import SamplerLost
from nanodag.host.process_memory import collect_rarely
from nanodag.inference import client as client_module
from nanodag.inference.client import SamplerClient
from nanodag.rewards.reward_pool import RewardPool
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.control.pool import RolloutPool
from nanodag.rl.control.step_records import Records
from nanodag.rl.rollouts import segments as segments_module
from nanodag.rl.rollouts.batch import RolloutBatch, staleness_metrics, without_stale
from nanodag.rl.rollouts.metrics import rollout_metrics
from nanodag.rl.rollouts.prompts import PolicyFormat, PromptCursor
from nanodag.rl.rollouts.rollout import read_lines, read_rollouts
from nanodag.rl.sync.broadcast_sync import DistributedSync
from nanodag.rl.trainer.rows import pack
from nanodag.worker.job import Job

STOP, VOCABULARY = 0, 50_000
PROMPT_TOKENS = 100
BUDGET_TOKENS = 16_384


def serve(number: int, num_tokens: int, delay_s: float, port: Connection) -> None:
    """A simulated sampler: every answer has the same tokens, so that it costs nothing to write."""
    draw = random.Random(number)
    ids = [draw.randrange(1, VOCABULARY) for _ in range(num_tokens - 1)] + [STOP]
    tokens = [[-3 * draw.random(), token, None] for token in ids]
    meta = {"finish_reason": {"type": "stop", "matched": STOP}, "weight_version": "0", "prompt_tokens": PROMPT_TOKENS}
    text = json.dumps({"output_ids": ids, "meta_info": {**meta, "id": "r", "output_token_logprobs": tokens}})

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(delay_s)
        answers = ",".join([text] * body["sampling_params"]["n"])
        return web.Response(text=f"[{answers}]", content_type="application/json")

    weights = {"weight_version": "0"}

    async def health(request: web.Request) -> web.Response:
        return web.json_response(weights)

    async def do(request: web.Request) -> web.Response:
        weights.update({name: value for name, value in (await request.json()).items() if name in weights})
        return web.json_response({})

    async def main() -> None:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/generate", generate)
        application.router.add_post("/{path:.*}", do)
        application.router.add_get("/{path:.*}", health)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


class Server:
    """One simulated sampler as a child process."""

    def __init__(self, number: int, *, num_tokens: int, delay_s: float) -> None:
        here, there = multiprocessing.Pipe()
        arguments = (number, num_tokens, delay_s, there)
        self._process: BaseProcess = multiprocessing.get_context("fork").Process(target=serve, args=arguments)
        self._process.start()
        if not here.poll(60):
            raise SamplerLost("a simulated server did not start within 60 s")
        self.url = f"http://127.0.0.1:{here.recv()}"

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def last_log_lines(self) -> str:
        return "no log"

    def stop(self) -> None:
        self._process.kill()
        self._process.join()

    kill = stop


class Words:
    """Every prompt of PROMPT_TOKENS, and an answer's text as short as one of so many tokens would be long."""

    def prompt(self, messages: Any, switches: Any = None, *, tools: Any = ()) -> list[int]:
        return [1] * PROMPT_TOKENS

    def decode(self, ids: Sequence[int]) -> str:
        return "word " * len(ids)


class Parts:
    """CPU seconds by part of this thread; what one part calls of another counts as the other's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count what the block takes, which must not wait."""
        began, outer, self._inner = time.thread_time(), self._inner, 0.0
        try:
            yield
        finally:
            taken = time.thread_time() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + taken - self._inner
            self._inner = outer + taken

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Count the calls of a function."""
        function: Callable[..., Any] = getattr(owner, attribute)

        def counted(*arguments: Any, **options: Any) -> Any:
            with self.timed(name):
                return function(*arguments, **options)

        setattr(owner, attribute, counted)


class Stage:
    """A controller with simulated samplers."""

    def __init__(self, folder: Path, chosen: argparse.Namespace, parts: Parts) -> None:
        self.chosen, self.parts = chosen, parts
        config = {
            "reward": {"f1": 1.0},
            "num_steps": chosen.steps,
            "prompts_per_step": chosen.prompts,
            "samples_per_prompt": chosen.samples,
            "max_new_tokens": chosen.tokens,
            "max_staleness": 1,
            "filters": [],
            "sampler": {"max_batch": 1_000_000},
        }
        self.config = RLStage.of(kind="rl", data=["file:x"], seed=1, **config)
        rows = [{"prompt": f"{n}", "answer": "word", "prompt_id": f"p{n}"} for n in range(4 * chosen.prompts)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        mixture = Mixture([SourceConfig(url=f"file:{folder}/prompts.jsonl")], kind="prompt", seed=0, repeat=True)
        words: Any = Words()
        self.cursor = PromptCursor(mixture, PolicyFormat(words, {}, ()), longest=1 << 20)
        start = partial(Server, num_tokens=chosen.tokens, delay_s=chosen.delay)
        self.servers = [start(number) for number in range(chosen.servers)]
        self.samplers = Fleet(
            self.servers,
            model=folder,
            version=0,
            launch=lambda number, model, version: start(number),
            connect=partial(SamplerClient, vocab_size=VOCABULARY, context_length=1 << 20),
        )
        self.rewards = RewardPool({"f1": 1.0})
        generator = RolloutGenerator(self.config, self.samplers, self.rewards, words, (STOP,))
        parts.wrap(generator, "_answer", "text for the reward")
        parts.wrap(generator, "_judge", "judge")
        parts.wrap(self.rewards, "submit_group", "submit to the rewards")
        self.pool = RolloutPool(generator, self.cursor)
        workspace = folder / "workspace"
        workspace.mkdir()
        self.job = Job(name="rl", run="benchmark", config=self.config, inputs={}, workspace=workspace)
        self.records = Records(self.job, resume_step=-1)

    async def run(self) -> list[str]:
        """All steps; the files of what was trained."""
        files = []
        for step in range(1, self.chosen.steps + 1):
            taking = asyncio.create_task(self.pool.take(step))
            if step == 2 and self.chosen.lost:
                await asyncio.sleep(self.chosen.delay / 2)
                for server in self.servers[: self.chosen.lost]:
                    os.kill(server.pid, signal.SIGKILL)
            files.append(self.note(step, await taking))
            self.pool.samplers_have(step)
        if self.chosen.buckets:
            await self.sync()
        await self.samplers.disconnect()
        return files

    async def sync(self) -> None:
        """Print what giving weights twice takes; only the first time servers join a group."""
        names = [f"model.layers.{number}.mlp.down_proj.weight" for number in range(20)]
        bucket = {"names": names, "dtypes": ["bfloat16"] * 20, "shapes": [[4096, 4096]] * 20}
        reply = {"buckets": [bucket] * self.chosen.buckets, "port": 1, "failure": "", "fingerprints": {}}

        async def ask(do: str, **arguments: Any) -> list[dict[str, Any]]:
            return [reply]

        way = DistributedSync(self.samplers, ask, check_every=0, timeout_s=600.0)
        for version in (1, 2):
            wall, cpu = time.monotonic(), time.process_time()
            await way.load(Path("weights", str(version)), version)
            wall, cpu = time.monotonic() - wall, time.process_time() - cpu
            print(f"weights in {self.chosen.buckets} buckets to {len(self.servers)}: {cpu:.2f} s CPU, {wall:.2f} s")

    def note(self, step: int, batch: RolloutBatch) -> str:
        """What the controller does of a step beside waiting."""
        with self.parts.timed("staleness"):
            batch = without_stale(batch, [0], largest=1)
            staleness_metrics(batch.trained, [0])
        with self.parts.timed("metrics"):
            rollout_metrics(batch.all_rollouts)
        with self.parts.timed("files"):
            path = self.records.rollouts(step, batch)
        with self.parts.timed("ledger"):
            self.records.ledger(step, batch)
        return path

    def close(self) -> None:
        """End every process."""
        self.records.close()
        self.samplers.close()
        self.rewards.close()
        for server in self.servers:
            server.stop()


def measure(chosen: argparse.Namespace) -> bool:
    """Print what it took; whether nothing was forgotten."""
    collect_rarely()
    parts = Parts()
    parts.wrap(client_module, "_parsed", "JSON of answers")
    parts.wrap(client_module, "completion_from_wire", "completions")
    parts.wrap(segments_module, "rollouts_from", "rollouts")
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder), chosen, parts)
        profile = cProfile.Profile() if chosen.profile else None
        try:
            before, cpu, began = _peak_mib(), time.process_time(), time.monotonic()
            if profile:
                profile.enable()
            files = asyncio.run(stage.run())
            if profile:
                profile.disable()
            wall, cpu = time.monotonic() - began, time.process_time() - cpu
            number = chosen.steps * chosen.prompts * chosen.samples
            ledger = list(read_lines(stage.job.records / "ledger.jsonl"))
            is_whole = (
                len({(line["epoch"], line["prompt_id"]) for line in ledger})
                == len(ledger)
                == (chosen.steps * chosen.prompts)
            )
            print(f"{number} rollouts of {chosen.tokens} tokens, {chosen.servers} servers, {chosen.lost} lost")
            print(f"{number / cpu:.0f} rollouts a second of one core ({cpu:.1f} s CPU, {wall:.1f} s)")
            print(f"{stage.samplers.num_restarts} servers started again; every prompt in the ledger once: {is_whole}")
            held = number / chosen.steps * 2
            print(f"memory: {_peak_mib() - before:.0f} MiB more than before, for at most {held:.0f} rollouts at once")
            parts.seconds["HTTP, reward pipes and the event loop"] = cpu - sum(parts.seconds.values())
            for name, seconds in sorted(parts.seconds.items(), key=lambda item: -item[1]):
                print(f"  {1e3 * seconds / number:.3f} ms a rollout  {name}")
            with parts.timed("read"):
                read = [list(read_rollouts(Path(path))) for path in files[:4]]
            with parts.timed("pack"):
                for rollouts in read:
                    pack(rollouts, budget_tokens=max(BUDGET_TOKENS, 2 * chosen.tokens))
            print("a rank of the trainer:")
            for name in ("read", "pack"):
                print(f"  {1e3 * parts.seconds[name] / sum(map(len, read)):.3f} ms a rollout  {name}")
        finally:
            stage.close()
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return is_whole and stage.samplers.num_restarts == chosen.lost


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure, and end with 1 where a prompt was forgotten."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--lost", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--delay", type=float, default=0.2, help="seconds that an answer takes")
    parser.add_argument("--buckets", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    raise SystemExit(not measure(parser.parse_args()))


if __name__ == "__main__":
    main()
