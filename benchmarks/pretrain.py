"""Pretraining steps side by side: ours at each ZeRO stage, a compiled plain PyTorch loop, and nanochat's own.

    python -m benchmarks.pretrain --precision bf16 --threads 2
    python -m benchmarks.pretrain --nanochat /path/to/nanochat

Each side runs in a process of its own, several times in turn; a row is the median over all timed steps. The plain loop
is what a careful reader would write: the same Qwen3-type shape, scaled_dot_product_attention with is_causal, all of it
under torch.compile, fused AdamW; in bf16 float32 weights under autocast. Same tokens a step on every side. CPU-seconds
are those of the process, all threads. FLOPs: nanodag.config.dial.flops_per_token for every row but that of nanochat,
whose model is another one and counts its own; the share is of what a square matmul does in a CPU-second in the same
precision, measured in the same process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nanodag.worker.launch import worker_environment

SIDES = ("plain", "zero0", "zero1", "zero2", "zero3")


def main() -> None:
    options = _options()
    if options.side:
        print("RESULT " + json.dumps(measure(options)), flush=True)
        os._exit(0)  # DeepSpeed's threads may abort a normal exit
    sides = [*options.sides, *(["nanochat"] if options.nanochat else [])]
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(options.repeats):
        for side in sides:
            found[side].append(_run(side))
    print(_table(found, options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw", help="of our side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after 3 that are not")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=list(SIDES))
    parser.add_argument("--nanochat", type=Path, help="a checkout of karpathy/nanochat")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(side: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.pretrain", *sys.argv[1:], "--side", side]
    out = subprocess.run(command, env=worker_environment(_options().threads), capture_output=True, text=True)
    lines = [line for line in out.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"side {side} gave no result:\n{out.stdout}\n{out.stderr}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of wall and CPU time of each timed step of one side, the last loss, and the matmul peak."""
    import torch

    from nanodag.config.dial import flops_per_token as dial_flops
    from nanodag.config.dial import shape_of

    torch.manual_seed(0)
    shape = shape_of(options.depth)
    flops_per_token: float = dial_flops(shape, options.vocabulary, options.sequence_length)
    if options.side == "plain":
        step = plain_side(options)
    elif options.side == "nanochat":
        step, flops_per_token = nanochat_side(options)
    else:
        step = our_side(options, int(options.side.removeprefix("zero")))
    rows = options.batch_tokens // options.sequence_length
    generator = torch.Generator().manual_seed(1)
    wall, cpu, loss = [], [], 0.0
    start = time.perf_counter()
    for index in range(options.steps + 3):
        tokens = torch.randint(0, options.vocabulary, (rows, options.sequence_length + 1), generator=generator)
        tokens[:, 1::2] = tokens[:, 0:-1:2] // 2  # something to learn
        began = time.perf_counter(), time.process_time()
        loss = step(tokens)
        if index >= 3:
            wall.append(time.perf_counter() - began[0])
            cpu.append(time.process_time() - began[1])
        elif index == 2:
            warm_up = time.perf_counter() - start
    if options.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(tokens)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=45, max_name_column_width=70))
    peak = matmul_peak_per_cpu_second(torch.float32 if options.precision == "fp32" else torch.bfloat16)
    flops = flops_per_token * options.batch_tokens
    return {"wall": wall, "cpu": cpu, "loss": loss, "peak": peak, "flops": flops, "warm_up": warm_up}


def matmul_peak_per_cpu_second(dtype: Any) -> float:
    """FLOPs a CPU-second of the best of many square matmuls: what other processes take away hardly shows."""
    import torch

    from nanodag.model.cpu_linear import times_transposed

    a, b = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(40):
        began = time.process_time()
        times_transposed(a, b)
        best = min(best, time.process_time() - began)
    return 2 * 1024**3 / best


def our_side(options: argparse.Namespace, stage: int) -> Any:
    import torch

    from nanodag.config.dial import shape_of
    from nanodag.config.supervised import OptimizerConfig
    from nanodag.model.build import initialise, qwen3_architecture
    from nanodag.model.decoder import Decoder, Layer
    from nanodag.train.deepspeed_engine import TrainEngine

    shape = shape_of(options.depth)
    architecture = qwen3_architecture(
        shape, vocabulary=options.vocabulary, rope_theta=10_000.0, max_positions=options.sequence_length
    )
    model = Decoder(architecture, compiled=True)
    initialise(model, 0)
    engine = TrainEngine(
        model,
        optimizer=OptimizerConfig(name=options.optimizer),
        zero_stage=stage,
        precision=options.precision,
        gradient_clipping=1.0,
        leaf_modules=(Layer,),
    )
    positions = torch.arange(options.sequence_length).expand(options.micro_batch_tokens // options.sequence_length, -1)
    documents = torch.zeros_like(positions, dtype=torch.int32)

    def step(tokens: torch.Tensor) -> float:
        micro = tokens.split(positions.shape[0])
        total = 0.0
        for index, rows in enumerate(micro):
            loss = engine(rows[:, :-1], positions, documents, rows[:, 1:])
            engine.backward(loss / options.batch_tokens, last=index == len(micro) - 1)
            total += loss.item()
        engine.step(learning_rate=1e-3, matrix_lr=0.01)
        return total / options.batch_tokens

    return step


def plain_side(options: argparse.Namespace) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    from nanodag.config.dial import shape_of

    shape = shape_of(options.depth)
    width, head = shape.width, shape.head_width

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)])
            self.q_norm, self.k_norm = nn.RMSNorm(head, eps=1e-6), nn.RMSNorm(head, eps=1e-6)
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(width, shape.mlp_width, bias=False) for _ in range(2))
            self.down = nn.Linear(shape.mlp_width, width, bias=False)

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            h = self.norms[0](x)
            q, k, v = (p(h).unflatten(-1, (-1, head)).transpose(1, 2) for p in (self.q, self.k, self.v))

            def turn(t: torch.Tensor) -> torch.Tensor:
                a, b = t.chunk(2, -1)
                return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

            q, k = turn(self.q_norm(q)), turn(self.k_norm(k))
            out = functional.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
            x = x + self.o(out.transpose(1, 2).flatten(-2))
            h = self.norms[1](x)
            return x + self.down(functional.silu(self.gate(h)) * self.up(h))

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(options.vocabulary, width)
            self.layers = nn.ModuleList(Layer() for _ in range(shape.depth))
            self.norm = nn.RMSNorm(width, eps=1e-6)
            self.head = nn.Linear(width, options.vocabulary, bias=False)
            if shape.tied_embeddings:
                self.head.weight = self.embed.weight
            angles = torch.arange(options.sequence_length)[:, None] / 10_000 ** (torch.arange(0, head, 2) / head)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x, self.cos, self.sin)
            return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())

    plain = Plain()
    for parameter in plain.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    model = torch.compile(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    count = options.batch_tokens // options.micro_batch_tokens

    def step(tokens: torch.Tensor) -> float:
        total = 0.0
        for rows in tokens.split(options.micro_batch_tokens // options.sequence_length):
            with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
                loss = model(rows[:, :-1], rows[:, 1:])
            (loss / count).backward()
            total += loss.item() / count
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def nanochat_side(options: argparse.Namespace) -> tuple[Any, float]:
    """nanochat's own model and optimizer, compiled as its base_train.py does it, and its own count of FLOPs a token.

    Its model is another one at the same depth and width: a 4x squared-ReLU MLP, value embeddings, untied head, so
    compare the share of the matmul peak rather than tokens a second. Its optimizer is Muon and AdamW.
    """
    import torch

    os.environ["NANOCHAT_DTYPE"] = {"fp32": "float32", "bf16": "bfloat16"}[options.precision]
    sys.path.insert(0, str(options.nanochat))
    from nanochat.gpt import GPT, GPTConfig

    from nanodag.config.dial import shape_of

    shape = shape_of(options.depth)
    plain = GPT(
        GPTConfig(
            sequence_len=options.sequence_length,
            vocab_size=options.vocabulary,
            n_layer=shape.depth,
            n_head=shape.num_heads,
            n_kv_head=shape.num_heads,
            n_embd=shape.width,
            window_pattern="L",
        )
    )
    plain.init_weights()
    model = torch.compile(plain, dynamic=False)
    optimizer = plain.setup_optimizer()
    count = options.batch_tokens // options.micro_batch_tokens

    def step(tokens: torch.Tensor) -> float:
        total = 0.0
        for rows in tokens.split(options.micro_batch_tokens // options.sequence_length):
            loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            (loss / count).backward()
            total += loss.item() / count
        optimizer.step()
        plain.zero_grad(set_to_none=True)
        return total

    return step, float(plain.estimate_flops())


def _table(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> str:
    lines = [
        f"depth {options.depth}, vocabulary {options.vocabulary}, {options.sequence_length} x "
        f"{options.batch_tokens // options.sequence_length} tokens a step, micro-batch {options.micro_batch_tokens}, "
        f"{options.precision}, {options.threads} threads, ours with {options.optimizer}",
        "| side | CPU-s a step | wall s | tokens per CPU-s | GFLOP a step | share of matmul peak | over plain | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def median(side: str, name: str) -> float:
        return statistics.median(value for run in found[side] for value in run[name])

    for side, runs in found.items():
        cpu, wall = median(side, "cpu"), median(side, "wall")
        peak = statistics.median(run["peak"] for run in runs)
        flops = runs[0]["flops"]
        ratio = f"{median('plain', 'cpu') / cpu:.2f}" if "plain" in found else "-"
        lines.append(
            f"| {side} | {cpu:.3f} | {wall:.3f} | {options.batch_tokens / cpu:,.0f} | {flops / 1e9:.0f} | "
            f"{flops / cpu / peak:.0%} | {ratio} | {runs[0]['loss']:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
