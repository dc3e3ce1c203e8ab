"""Embedded sampler beside transformers' generate: the same model, prompts, precision and number of tokens.

    python -m benchmarks.sampler_vs_hf                                   # a random Qwen3 of 1.84 M parameters
    python -m benchmarks.sampler_vs_hf --model DIR --dtype bfloat16 --batch 64 1

For each batch size all sides run in turn (A B C D A B C D ...), each in a process of its own, so that a change of the
machine's speed meets all. Reported: tokens per CPU-second (user and system, all threads, a server's process included;
median and range over the rounds), the median of the ratios to transformers round by round, peak resident memory, and
the largest difference of a logprob from a teacher-forced pass of transformers in float32. Prompts are part of the time.

``bare matmuls`` is the floor: the weights' matrix products of one step at that batch size and nothing else, no
attention, no softmax, no drawing. At batch 1 it is the time that it takes to read the weights once.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nanodag.worker.launch import worker_environment

REFERENCE = "transformers"
SIDES = (REFERENCE, "sampler", "sampler, deterministic", "sampler over HTTP", "bare matmuls")
RANDOM_MODEL = {
    "vocab_size": 8192, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 384, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; default: random Qwen3, 1.84 M parameters")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 1])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.side:
        serve_side(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            args.model = Path(folder)
            write_random_model(args.model)
        rows = [row for batch in args.batch for row in compare(args, batch)]
    print(f"\n{args.dtype}, {args.threads} thread(s), prompt {args.prompt}, {args.new} new, {args.rounds} rounds")
    print(f"| batch | {'side':<22} | tokens / CPU-s | range           | ratio | peak MiB | logprob difference |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    return 0


def write_random_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**RANDOM_MODEL)).save_pretrained(folder)


def compare(args: argparse.Namespace, batch: int) -> list[str]:
    """One line of the table per side."""
    workers = {side: Worker(args, side, batch) for side in SIDES}
    results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(args.rounds + 1):
        for side, worker in workers.items():
            result = worker.round(is_last=number == args.rounds)
            if number:  # the first round warms up
                results[side].append(result)
    for worker in workers.values():
        worker.close()
    return [line_of(batch, side, results[side], results[REFERENCE]) for side in SIDES]


def line_of(batch: int, side: str, rounds: list[dict[str, float]], reference: list[dict[str, float]]) -> str:
    speeds = [result["tokens_per_cpu_s"] for result in rounds]
    ratio = statistics.median(speed / other["tokens_per_cpu_s"] for speed, other in zip(speeds, reference, strict=True))
    span = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
    difference = rounds[-1].get("logprob_difference")
    shown = "" if difference is None else f"{difference:.1e}"
    return (
        f"| {batch:>5} | {side:<22} | {statistics.median(speeds):>14,.0f} | {span:<15} | {ratio:>5.1f} | "
        f"{rounds[-1]['peak_rss_mib']:>8,.0f} | {shown:>18} |"
    )


class Worker:
    """A process that runs one side, one round each time it is asked."""

    def __init__(self, args: argparse.Namespace, side: str, batch: int) -> None:
        options = {
            "model": args.model, "dtype": args.dtype, "batch": batch, "prompt": args.prompt, "new": args.new,
            "threads": args.threads, "side": side,
        }  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "benchmarks.sampler_vs_hf",
            *(f"--{name}={value}" for name, value in options.items()),
        ]
        environment = worker_environment(args.threads)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def round(self, *, is_last: bool) -> dict[str, float]:
        self.process.stdin.write("last\n" if is_last else "next\n")
        self.process.stdin.flush()
        # transformers prints on stdout, too: our line is the one that is JSON.
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"a side ended with code {self.process.wait()}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def serve_side(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(args.threads)
    (batch,) = args.batch
    generator = torch.Generator().manual_seed(0)
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    prompts = torch.randint(3, vocab_size, (batch, args.prompt), generator=generator)
    make = {REFERENCE: transformers_side, "sampler over HTTP": http_side, "bare matmuls": matmul_side}
    side: Side = make.get(args.side, sampler_side)(args, prompts)
    for line in sys.stdin:
        begin = side.cpu_seconds()
        completions = side.run()
        elapsed = side.cpu_seconds() - begin
        result = {"tokens_per_cpu_s": batch * args.new / elapsed, "peak_rss_mib": side.peak_rss_mib()}
        if completions is not None and line == "last\n":  # only then: it loads transformers into this process
            result["logprob_difference"] = logprob_difference(args, prompts, completions)
        print(json.dumps(result), flush=True)


class Side:
    """What is measured: ``run`` generates once, and returns completions if their logprobs are to be checked."""

    def __init__(self, run: Callable[[], list | None], pid: int | None = None) -> None:
        """pid: of a server whose time and memory count, too."""
        self.run = run
        self._server = pid

    def cpu_seconds(self) -> float:
        own = time.process_time()
        if self._server is None:
            return own
        import psutil

        times = psutil.Process(self._server).cpu_times()
        return own + times.user + times.system

    def peak_rss_mib(self) -> float:
        # Not ru_maxrss, which a process begins with what its parent had.
        status = Path(f"/proc/{self._server or os.getpid()}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024


def transformers_side(args: argparse.Namespace, prompts: "torch.Tensor") -> Side:  # noqa: F821
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()

    def run() -> None:
        with torch.inference_mode():
            output = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_p=1.0, top_k=0,
                max_new_tokens=args.new, min_new_tokens=args.new, pad_token_id=0,
            )  # fmt: skip
        assert output.shape[1] == args.prompt + args.new

    return Side(run)


def requests_of(args: argparse.Namespace, prompts: "torch.Tensor") -> list:  # noqa: F821
    from nanodag.inference.protocol import Request, SamplingParams

    params = SamplingParams(max_new_tokens=args.new, ignore_eos=True)
    return [Request(input_ids=prompt, params=params) for prompt in prompts.tolist()]


def sampler_side(args: argparse.Namespace, prompts: "torch.Tensor") -> Side:  # noqa: F821
    from nanodag.inference.engine_settings import EngineSettings
    from tests.sampler.reference import WholeEngine

    deterministic = args.side.endswith("deterministic")
    settings = EngineSettings(model=args.model, dtype=args.dtype, max_batch=len(prompts), deterministic=deterministic)
    engine = WholeEngine(settings)
    requests = requests_of(args, prompts)

    def run() -> list:
        engine.forget_prompts()
        return [group[0] for group in engine.generate(requests)]

    return Side(run)


def http_side(args: argparse.Namespace, prompts: "torch.Tensor") -> Side:  # noqa: F821
    import atexit

    from nanodag.engines.start import start_engine
    from nanodag.inference.client import SamplerClient
    from nanodag.inference.engine_settings import EngineSettings

    log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 (lives as long as the process)
    settings = EngineSettings(model=args.model, dtype=args.dtype, max_batch=len(prompts), threads=args.threads)
    process = start_engine(settings, log_path=log.name)
    atexit.register(process.stop)
    requests = requests_of(args, prompts)

    async def generate() -> list:
        async with SamplerClient(process.url) as client:
            await client.flush_cache()
            return [group[0] for group in await client.generate(requests)]

    def run() -> list:
        assert log.name
        return asyncio.run(generate())

    return Side(run, process.pid)


def matmul_side(args: argparse.Namespace, prompts: "torch.Tensor") -> Side:  # noqa: F821
    import torch

    from nanodag.inference.engine_settings import EngineSettings
    from nanodag.sampler.engine import Engine

    weights = Engine(EngineSettings(model=args.model, dtype=args.dtype, max_batch=1)).model.weights
    matrices = [getattr(layer, name) for layer in weights.layers for name in ("qkv", "output", "gate_up", "down")]
    pairs = [(torch.randn(len(prompts), m.shape[0], dtype=m.dtype), m) for m in [*matrices, weights.head]]
    outputs = [torch.empty(len(prompts), m.shape[1], dtype=m.dtype) for _, m in pairs]

    def run() -> None:
        with torch.inference_mode():
            for _ in range(args.new):
                for (x, matrix), out in zip(pairs, outputs, strict=True):
                    torch.mm(x, matrix, out=out)

    return Side(run)


def logprob_difference(args: argparse.Namespace, prompts: "torch.Tensor", completions: list) -> float:  # noqa: F821
    """Largest difference from transformers in float32, teacher-forced over the sampled tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    outputs = torch.tensor([completion.output_ids for completion in completions])
    with torch.inference_mode():
        logits = model(torch.cat([prompts, outputs], dim=1)).logits[:, args.prompt - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(-1, outputs[..., None])[..., 0]
    found = torch.tensor([completion.logprobs for completion in completions])
    return (found - expected).abs().max().item()


if __name__ == "__main__":
    sys.exit(main())
