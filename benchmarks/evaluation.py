"""Speed of an evaluation on a CPU, beside lm-eval's own HFLM at its best batch: the same benchmarks, items and model.

    python -m benchmarks.evaluation MODEL_FOLDER --mirror MIRROR [--precision bf16] [--items 100] [--only gsm8k]
    python -m benchmarks.evaluation TOKENIZER_FOLDER --mirror MIRROR --width 768 --layers 12    # random weights

Each side is a process of its own with one thread, since the libraries below it keep settings for a whole process.
HFLM first tries each of --batches on a benchmark; then both sides answer it in turn, --rounds times, HFLM with the
batch that was fastest. Reported: tokens that ours reads and writes; CPU-seconds of the requests (tokenizer and model;
the median); how many times as fast ours is in them; the same of the whole benchmark (items and scores too, which
lm-eval makes on both sides). Written answers have --new tokens at most. The process fails where a bar is missed.

As on a processor without AVX-512 (ours asks the processor itself, so its compiled kernels keep AVX-512):
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 DNNL_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.data.config import SourceConfig
from nanodag.worker.launch import worker_environment

os.environ.setdefault("TQDM_DISABLE", "1")

SIDES = ("ours", "HFLM")
ASKED = ("loglikelihood", "loglikelihood_rolling", "generate_until")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A benchmark. bar: how many times as fast ours is to be. examples: where num_examples worked ones come from."""

    bar: float
    source: str
    form: str
    examples: str = ""
    num_examples: int = 0

    def config(self, name: str, items: int) -> BenchmarkConfig:
        """As an eval stage has it."""
        fewshot = SourceConfig(url=self.examples) if self.examples else None
        return BenchmarkConfig(
            name=name,
            form=self.form,
            source=self.source,
            limit=items,
            fewshot=fewshot,
            num_fewshot=self.num_examples,
        )


CASES = {
    "arc_easy": Case(bar=3, source="hub:allenai/ai2_arc/ARC-Easy:validation", form="arc_easy"),
    "arc_easy_3_examples": Case(
        bar=3,
        source="hub:allenai/ai2_arc/ARC-Easy:validation",
        form="arc_easy",
        examples="hub:allenai/ai2_arc/ARC-Challenge:validation",
        num_examples=3,
    ),
    "piqa": Case(bar=3, source="hub:baber/piqa/default:validation", form="piqa"),
    "mmlu": Case(bar=3, source="hub:cais/mmlu/all:test", form="mmlu"),
    "winogrande": Case(bar=1.3, source="hub:allenai/winogrande/winogrande_xl:validation", form="winogrande"),
    "bits_per_byte": Case(bar=1.3, source="hub:openai/gsm8k/main:test", form="bits_per_byte"),
    "gsm8k": Case(bar=3, source="hub:openai/gsm8k/main:test", form="gsm8k"),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--mirror", type=Path, required=True)
    parser.add_argument("--precision", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--width", type=int, default=0, help="of a random Qwen3 with the tokenizer of MODEL_FOLDER")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=256, help="tokens of a written answer at most, as lm-eval has them")
    parser.add_argument("--only", nargs="*", default=[], choices=list(CASES))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.side:
        serve_side(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if args.width:
            args.model = random_model(args, Path(folder))
        sides = {name: Side(args, name) for name in SIDES}
        print("| benchmark | tokens | ours CPU-s | HFLM CPU-s (batch) | times as fast | range | whole | bar |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        missed = [name for name in args.only or CASES if not compare(args, name, sides)]
        for side in sides.values():
            side.close()
    return 1 if missed else 0


def random_model(args: argparse.Namespace, folder: Path) -> Path:
    """A folder with a random Qwen3 of heads of 64, and the tokenizer of the model that was named."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    heads = args.width // 64
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=args.width, num_hidden_layers=args.layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=64, intermediate_size=3 * args.width, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def compare(args: argparse.Namespace, name: str, sides: dict[str, "Side"]) -> bool:
    """One line of the table; whether the bar is reached."""
    theirs = {batch: sides["HFLM"].ask(name, batch) for batch in args.batches}
    batch = min(theirs, key=lambda size: theirs[size]["asked_s"])
    sides["ours"].ask(name, 0)  # warms up, as theirs has
    rounds = [{side: sides[side].ask(name, batch) for side in SIDES} for _ in range(args.rounds)]
    ratios = [one["HFLM"]["asked_s"] / one["ours"]["asked_s"] for one in rounds]
    asked = {side: statistics.median(one[side]["asked_s"] for one in rounds) for side in SIDES}
    whole = {side: statistics.median(one[side]["whole_s"] for one in rounds) for side in SIDES}
    tokens = rounds[-1]["ours"]["tokens"]
    print(
        f"| {name} | {tokens:,.0f} | {asked['ours']:.2f} | {asked['HFLM']:.2f} ({batch}) "
        f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} "
        f"| {whole['HFLM'] / whole['ours']:.2f} | {CASES[name].bar} |",
        flush=True,
    )
    return statistics.median(ratios) >= CASES[name].bar


class Side:
    """A process that answers a benchmark each time it is asked."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        command = [
            sys.executable, "-m", "benchmarks.evaluation", str(args.model), "--mirror", str(args.mirror),
            "--precision", args.precision, "--items", str(args.items), "--new", str(args.new), "--side", name,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=worker_environment(1)
        )

    def ask(self, name: str, batch: int) -> dict[str, float]:
        """asked_s, whole_s: CPU-seconds. tokens: that ours read and wrote."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{json.dumps([name, batch])}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"asked_s"'):
                return json.loads(line)
        raise SystemExit(f"a side ended with code {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve_side(args: argparse.Namespace) -> None:
    import torch

    from nanodag.evaluation.harness import run_benchmark

    torch.set_num_threads(1)
    model = our_model(args) if args.side == "ours" else their_model(args)
    asked_s = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            nonlocal asked_s
            began = time.process_time()
            try:
                return function(*given, **named)
            finally:
                asked_s += time.process_time() - began

        return call

    for name in ASKED:
        setattr(model, name, timed(getattr(model, name)))
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            name, batch = json.loads(line)
            config = CASES[name].config(name, args.items)
            model.batch_size_per_gpu = batch
            tokens = getattr(model, "tokens_read", 0) + getattr(model, "tokens_written", 0)
            asked_s, began = 0.0, time.process_time()
            run_benchmark(model, config, chat=False, seed=0, mirror=str(args.mirror), folder=Path(folder))
            whole_s = time.process_time() - began
            tokens = getattr(model, "tokens_read", 0) + getattr(model, "tokens_written", 0) - tokens
            print(json.dumps({"asked_s": asked_s, "whole_s": whole_s, "tokens": tokens}), flush=True)


def our_model(args: argparse.Namespace) -> Any:
    from nanodag.config.kinds.evaluation import EvalStage
    from nanodag.evaluation.evaluated_model import EvaluatedModel

    sampler = {"engine": "embedded", "replicas": 1, "max_batch": 64, "cache_bytes": 2 << 30}
    asked = {"device": "cpu", "threads": 1, "micro_batch_tokens": 1024, "sampler": sampler}
    given = {"precision": args.precision, "max_new_tokens": args.new}
    return EvaluatedModel(args.model, EvalStage.of(kind="eval", benchmarks=[{"name": "gsm8k"}], **asked, **given))


def their_model(args: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.agreement import Theirs

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, DTYPES[args.precision])).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model.generation_config.eos_token_id = sorted({tokenizer.eos_token_id, tokenizer.bos_token_id} - {None})
    return Theirs(pretrained=model, tokenizer=tokenizer, batch_size=1, new_tokens=args.new)


if __name__ == "__main__":
    raise SystemExit(main())
