"""What becomes of samplers killed while they take weights: `python -m benchmarks.sync_kills`.

Two servers of a tiny model, and the code of a stage that gives them weights: Fleet, DiskSync, DistributedSync or
SharedSync, the trainer's WeightGiver. First one sync of each way is run undisturbed and its steps are written down:
each request to each server (about to be sent, under way, answered), and each thing that the trainer is asked for (about
to begin, at each bucket, done). Then each run gives new weights and kills (SIGKILL) the server at one step; runs are
spread evenly over all steps, all ways, with and without requests under way. After each run both servers must say that
they have the new version, hold the trainer's weights to the bit and have answered what was under way; exactly one was
started again.

The engine embedded needs nothing; sglang needs `nanodag sampler install --cpu`, and a server of SGLang
takes a minute of CPU to start again. A line for each run; the exit code is 1 if one failed.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanodag.engines.fleet import Fleet
from nanodag.engines.start import ServerProcess, start_engine
from nanodag.errors.words import counted
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.model.folder import write_like
from nanodag.rl.sync.broadcast_sync import DistributedSync, SharedSync
from nanodag.rl.sync.weight_sync import DiskSync
from nanodag.rl.trainer.weight_sender import WeightGiver
from nanodag.sampler.fingerprints import Fingerprints

CONTEXT = 128
BUCKET_BYTES = 4000
TIMEOUT_S = 20.0  # of a broadcast
START_S = 1500.0
RUN_S = 1800.0
UNDER_WAY_S = 0.001
Engine = Literal["embedded", "sglang"]
Way = Literal["disk", "distributed", "ipc"]
Step = tuple[int, str]
"""The server that is killed, and what it was at."""


@dataclass(frozen=True)
class Case:
    """How weights are given. is_busy: while requests stand at the servers."""

    way: Way
    is_busy: bool


@dataclass
class Plan:
    """Kills a server when its step comes. steps: that came by, each once, in order."""

    at: Step | None = None
    kill: Callable[[int], None] = lambda number: None
    steps: dict[Step, None] = field(default_factory=dict)
    is_done: bool = False

    def reached(self, number: int, what: str) -> None:
        self.steps[number, what] = None
        if (number, what) == self.at and not self.is_done:
            self.is_done = True
            self.kill(number)


class Weights:
    """What `Shares` is on one rank, over tensors that change with every version."""

    dtype = torch.float32

    def __init__(self, source: Path) -> None:
        model = Qwen3ForCausalLM.from_pretrained(source)  # in its order: SGLang fuses neighbours
        self.tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
        self.kept = self.tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        self.num_bytes = {name: tensor.nbytes for name, tensor in self.tensors.items()}
        self.at_bucket: Callable[[str], None] = lambda name: None

    def change(self) -> None:
        self.tensors = {name: tensor * 1.01 for name, tensor in self.tensors.items()}

    def keep(self) -> None:
        self.kept = self.tensors

    def together(self, names: list[str], *, kept: bool = False) -> Tensor:
        if not kept:
            self.at_bucket(names[0])
        held = self.kept if kept else self.tensors
        return torch.cat([held[name].reshape(-1).view(torch.uint8) for name in names])


class Trainer:
    """Rank 0, one thing at a time, as a stage's `RankLink` asks for it."""

    def __init__(self, source: Path, engine: Engine) -> None:
        self.source, self.engine = source, engine
        self.weights = Weights(source)
        self.plan = Plan()
        self.giver = WeightGiver(
            self.weights,
            rank=0,
            prefix="",
            bucket_bytes=BUCKET_BYTES,
            timeout_s=TIMEOUT_S,
            make_fingerprints=self._fingerprints,
        )
        self._lock = asyncio.Lock()

    async def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        async with self._lock:
            self._reached(f"{do} begins")
            self.weights.at_bucket = lambda name: self._reached(f"{do} of {name}")
            asked = self.export if do == "export" else getattr(self.giver, do)
            found = await asyncio.to_thread(asked, **arguments)
            self._reached(f"{do} ends")
            return [found]

    def _reached(self, what: str) -> None:
        for number in range(2):
            self.plan.reached(number, what)

    def export(self, folder: str, fingerprint: bool = False, kept: bool = False) -> dict[str, Any]:
        found = self._fingerprints()
        own = ((name, tensor) for name, tensor in self.weights.tensors.items())
        write_like(
            self.source,
            Path(folder),
            self.giver.tensors(kept=True) if kept else own,
            dtype=torch.float32,
            on_tensor=found.add if fingerprint else None,
        )
        return {"fingerprints": found.all()}

    def expected(self) -> dict[str, str]:
        found = self._fingerprints()
        for name, tensor in self.weights.tensors.items():
            found.add(name, tensor)
        return found.all()

    def _fingerprints(self) -> Fingerprints:
        return Fingerprints("sglang", torch.float32) if self.engine == "sglang" else Fingerprints("checkpoint")


class Bench:
    """Two servers that outlive the runs, and what gives them weights."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder, self.engine = folder, engine
        self.trainer = Trainer(save_model(folder / "model"), engine)
        self.version = 0
        self._numbers: dict[str, int] = {}
        self._syncs: dict[Way, DiskSync | DistributedSync] = {}

    async def __aenter__(self) -> "Bench":
        model = self.folder / "model"
        servers = await asyncio.gather(*(asyncio.to_thread(self._launch, number, model, 0) for number in range(2)))
        self.samplers = Fleet(
            servers,
            model=model,
            version=0,
            launch=self._launch,
            connect=self._connect,
            health_every_s=0.05,
            pause="in_place",
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        self.samplers.close()
        await self.samplers.disconnect()
        self.trainer.giver.close()

    async def sync(self, case: Case, at: Step | None) -> Plan:
        """Give new weights in that way, with a kill at a step; raises what is wrong afterwards."""
        samplers, restarts = self.samplers, self.samplers.num_restarts
        servers = [member.server for member in await samplers.members()]
        self.trainer.plan = plan = Plan(at, lambda number: os.kill(servers[number].pid, signal.SIGKILL))
        self.version += 1
        self.trainer.weights.change()
        folder, sync = self.folder / f"weights-{self.version}", self._sync_of(case)
        asked = [asyncio.ensure_future(samplers.generate([request(n)])) for n in range(4 * case.is_busy)]
        if case.is_busy:
            await asyncio.sleep(0.05)
        await sync.publish(folder, self.version)
        await sync.load(folder, self.version)
        self.trainer.plan = Plan()  # what follows is no step of the sync
        if (versions := await samplers.versions()) != [str(self.version)] * 2:
            raise AssertionError(f"the samplers say {versions} instead of {self.version}")
        for (held,) in await samplers.fingerprints():
            if held != self.trainer.expected():
                raise AssertionError("a sampler holds other weights than the trainer's")
        await asyncio.gather(*asked)
        ((late,),) = await samplers.generate([request(9, n=1)])
        if late.weight_version != str(self.version):
            raise AssertionError(f"a sampler answers with weights {late.weight_version} instead of {self.version}")
        if (found := samplers.num_restarts - restarts) != plan.is_done:
            raise AssertionError(f"{found} samplers were started again")
        return plan

    def _sync_of(self, case: Case) -> DiskSync | DistributedSync:
        """An idle case begins as a stage does, with a sync of its own; a busy one finds what the case before left."""
        if case.way not in self._syncs or not case.is_busy:
            ask, options = self.trainer.ask, {"timeout_s": TIMEOUT_S, "is_beside": self.engine == "embedded"}
            if case.way == "disk":
                self._syncs[case.way] = DiskSync(self.samplers, ask, check_every=1)
            else:
                sync = DistributedSync if case.way == "distributed" else SharedSync
                self._syncs[case.way] = sync(self.samplers, ask, check_every=1, **options)
        return self._syncs[case.way]

    def _connect(self, url: str) -> SamplerClient:
        number, bench = self._numbers[url], self

        class Client(SamplerClient):
            async def _call(self, method: str, path: str, body: Any = None) -> bytes:
                plan = bench.trainer.plan
                if path == "/generate":
                    return await super()._call(method, path, body)
                plan.reached(number, f"{path} about to be sent")
                later = asyncio.get_running_loop().call_later(UNDER_WAY_S, plan.reached, number, f"{path} under way")
                try:
                    found = await super()._call(method, path, body)
                finally:
                    later.cancel()
                plan.reached(number, f"{path} answered")
                return found

        return Client(url)

    def _launch(self, number: int, model: Path, version: int) -> ServerProcess:
        settings = EngineSettings(
            engine=self.engine,
            dtype="float32",
            max_batch=8,
            context_length=CONTEXT,
            memory_fraction=0.1,
            options={"disable_radix_cache": True},
            start_timeout_s=START_S,
        )
        server = start_engine(settings.of_replica(number, model, version), log_path=self.folder / f"log-{number}")
        self._numbers[server.url] = number
        return server


def request(number: int, n: int = 8) -> Request:
    params = SamplingParams(n=n, max_new_tokens=100, ignore_eos=True, temperature=0.7)
    return Request(input_ids=[1, 2, number], params=params, rid=f"r{number}-{n}-{random.random()}")


def save_model(folder: Path) -> Path:
    """A Qwen3 of two layers with random weights, in float32."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def spread(steps: dict[Case, list[Step]], num_runs: int) -> Iterator[tuple[Case, Step]]:
    """So many of all steps, at even distances, the cases in turn."""
    every = [(case, step) for case, of_case in steps.items() for step in of_case]
    for number in range(num_runs):
        yield every[number * len(every) // num_runs % len(every)]


async def run_cases(folder: Path, engine: Engine, *, num_runs: int, cases: list[Case]) -> int:
    """The runs; how many failed. One that fails ends them: the servers after it are in no known state."""
    async with Bench(folder, engine) as bench:
        steps: dict[Case, list[Step]] = {}
        for case in cases:
            steps[case] = list((await bench.sync(case, None)).steps)
        num_steps = sum(map(len, steps.values()))
        print(f"{engine}: {num_steps} steps in {len(cases)} cases", flush=True)
        num_kills = 0
        for number, (case, step) in enumerate(spread(steps, num_runs)):
            began = time.monotonic()
            name = f"{number:3} {case.way:11} {'busy' if case.is_busy else 'idle'}  sampler {step[0]} at {step[1]}"
            try:
                plan = await asyncio.wait_for(bench.sync(case, step), RUN_S)
            except Exception as error:  # noqa: BLE001 - whatever it is, it would have ended a stage
                print(f"{name}: FAILED after {time.monotonic() - began:.1f} s: {error!r}", flush=True)
                return 1
            num_kills += plan.is_done
            how = "killed" if plan.is_done else "not reached"
            print(f"{name}: {how}, right after {time.monotonic() - began:.1f} s", flush=True)
    print(f"{counted(num_runs, 'run')}, {counted(num_kills, 'kill')}, 0 failures", flush=True)
    return 0


CASES = [Case(way, is_busy) for is_busy in (False, True) for way in get_args(Way)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    with tempfile.TemporaryDirectory() as name:
        work = run_cases(Path(name), asked.engine, num_runs=asked.runs, cases=CASES)
        with suppress(KeyboardInterrupt):
            sys.exit(asyncio.run(work))


if __name__ == "__main__":
    main()
