"""How long new weights take to the samplers: `python -m benchmarks.weight_sync [--shape small half-billion]`.

All ways in turn, disk (a folder in /dev/shm), distributed (gloo) and ipc (shared memory), on one machine, from one
trainer rank to embedded samplers: from when the trainer's weights are ready until every sampler says that it has them.
The shapes: `small`, the 6.17-million-parameter Qwen2 of rl_vs_trl.py in fp32 (25 MB); `thirty-million`, one of 29
million in fp32 (117 MB); `half-billion`, Qwen2.5-0.5B in bf16 (1 GB). With `--lora-rank 16` the trainer has adapters,
which go merged by each way and then alone. Weights are random. What is timed is the code of a stage; the trainer's rank
is a thread of this process, and holds the weights as ZeRO-3 does on one rank, without an optimizer. Verified is the
first sync of each way, which is not counted.

Printed: medians and ranges of wall seconds, and CPU-seconds of both sides; each round changes the weights.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from nanodag.engines.fleet import Fleet
from nanodag.engines.start import ServerProcess, start_engine
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.model.folder import write_like
from nanodag.model.lora import add_lora, merged, save_adapter
from nanodag.rl.sync.broadcast_sync import DistributedSync, SharedSync
from nanodag.rl.sync.weight_sync import DiskSync
from nanodag.rl.trainer.weight_sender import WeightGiver
from nanodag.sampler.fingerprints import Fingerprints, fingerprints_of
from nanodag.train.shares import Shares

SHAPES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "small": (
        torch.float32,
        {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
        | {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256},
    ),
    "thirty-million": (
        torch.float32,
        {"vocab_size": 16384, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 12}
        | {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 256},
    ),
    "half-billion": (
        torch.bfloat16,
        {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
        | {"num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096},
    ),
}
TIMEOUT_S = 120.0
LORA_SCALE = 2.0
TICK = os.sysconf("SC_CLK_TCK")


class Trainer:
    """Its only rank. Answers what the controller's `ask` asks for. alone: adapters are given without the rest."""

    def __init__(
        self, model: torch.nn.Module, source: Path, dtype: torch.dtype, bucket_bytes: int, *, alone: bool = False
    ) -> None:
        self.model, self.source, self.dtype = model, source, dtype
        for parameter in model.parameters():
            parameter.ds_tensor = parameter.data.view(-1)  # as ZeRO-3 has it on one rank
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        shares = Shares(model, shapes, dtype=dtype, is_spread=True)
        self.giver = WeightGiver(
            shares,
            rank=0,
            prefix="",
            bucket_bytes=bucket_bytes,
            timeout_s=TIMEOUT_S,
            make_fingerprints=lambda: Fingerprints("checkpoint"),
            lora_scale=LORA_SCALE,
            gives_adapters=alone,
        )

    async def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        asked = getattr(self, do, None) or getattr(self.giver, do)
        return [await asyncio.to_thread(asked, **arguments)]

    def export(self, folder: str, fingerprint: bool) -> dict[str, Any]:
        found = Fingerprints("checkpoint")
        write_like(
            self.source,
            Path(folder),
            merged(self.model.named_parameters(), scale=LORA_SCALE),
            dtype=self.dtype,
            on_tensor=found.add if fingerprint else None,
        )
        return {"fingerprints": found.all()}

    def export_adapter(self, folder: str, fingerprint: bool) -> dict[str, Any]:
        found = fingerprints_of(self.giver.tensors(merged=True)) if fingerprint else {}
        rank = next(t.shape[0] for name, t in self.model.named_parameters() if name.endswith(".down"))
        weights = dict(self.giver.tensors())
        save_adapter(Path(folder), weights, alpha=LORA_SCALE * rank, dtype=self.dtype)
        return {"fingerprints": found}


def cpu_seconds(pids: list[int]) -> float:
    """Of these processes so far, user and system."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICK


async def measure(
    name: str, folder: Path, *, rounds: int, replicas: int, bucket_bytes: int, lora_rank: int = 0
) -> None:
    """Print a line for each way."""
    dtype, sizes = SHAPES[name]
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder / "model")
    if lora_rank:
        model.leaf_modules = (Qwen2DecoderLayer,)
        add_lora(model, rank=lora_rank, alpha=LORA_SCALE * lora_rank, seed=0)
        model.requires_grad_(False).to(dtype)
    named = [(name, parameter) for name, parameter in model.named_parameters() if not lora_rank or name.endswith(".up")]
    changed = named[0][1]
    trainer = Trainer(model, folder / "model", dtype, bucket_bytes)
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    servers = [
        start_engine(
            EngineSettings(model=folder / "model", dtype=names[dtype], max_batch=8, context_length=256),
            log_path=folder / f"log-{number}",
        )
        for number in range(replicas)
    ]
    samplers = Fleet(servers, model=folder / "model", version=0, launch=_no_launch, connect=SamplerClient)
    never = 1 << 30  # after the first
    ways: dict[str, DiskSync | DistributedSync] = {
        "disk": DiskSync(samplers, trainer.ask, check_every=never),
        "distributed": DistributedSync(samplers, trainer.ask, check_every=never, timeout_s=TIMEOUT_S, is_beside=True),
        "ipc": SharedSync(samplers, trainer.ask, check_every=never, timeout_s=TIMEOUT_S, is_beside=True),
    }
    if lora_rank:
        alone = Trainer(model, folder / "model", dtype, bucket_bytes, alone=True)
        common: dict[str, Any] = {"check_every": never, "gives_adapters": True}
        beside = {**common, "timeout_s": TIMEOUT_S, "is_beside": True}
        ways["disk, adapters"] = DiskSync(samplers, alone.ask, **common)
        ways["distributed, adapters"] = DistributedSync(samplers, alone.ask, **beside)
        ways["ipc, adapters"] = SharedSync(samplers, alone.ask, **beside)
    num_bytes = dict.fromkeys(ways, 0.0)
    pids = [os.getpid(), *(server.pid for server in servers)]
    wall: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    try:
        for version in range(1, rounds + 2):
            for way, sync in ways.items():
                changed.data.flatten()[:64].add_(1.0 if lora_rank == 0 else 0.01)
                own = folder / f"{way}-{version}"
                before, began = cpu_seconds(pids), time.monotonic()
                await sync.publish(own, version)
                await sync.load(own, version)
                wall[way].append(time.monotonic() - began)
                num_bytes[way] = sync.taken()["sync_bytes"]
                cpu[way].append(cpu_seconds(pids) - before)
            for way in ways:
                shutil.rmtree(folder / f"{way}-{version - 1}", ignore_errors=True)
    finally:
        trainer.giver.close()
        await samplers.disconnect()
        samplers.close()
    for way in ways:
        seconds = wall[way][1:]
        print(
            f"{name:14} {num_bytes[way] / 1e6:7.1f} MB  {way:21}  median {statistics.median(seconds):.3f} s"
            f"  ({min(seconds):.3f} to {max(seconds):.3f})  CPU {statistics.median(cpu[way][1:]):.2f} s"
            f"  verified {wall[way][0]:.3f} s",
            flush=True,
        )


def _no_launch(number: int, model: Path, version: int) -> ServerProcess:
    raise AssertionError("a sampler was lost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--bucket-bytes", type=int, default=64 << 20)
    parser.add_argument("--lora-rank", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in options.shape:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="weight-sync-") as folder:
            asyncio.run(
                measure(
                    name,
                    Path(folder),
                    rounds=options.rounds,
                    replicas=options.replicas,
                    bucket_bytes=options.bucket_bytes,
                    lora_rank=options.lora_rank,
                )
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
