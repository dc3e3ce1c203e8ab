"""Bits per byte of a pretraining step's variants: tokens, seeds and data the same, one thing changed.

    python -m benchmarks.recipe --depth 2 --tokens 2408448 --seeds 71 72 73
    python -m benchmarks.recipe --depth 3 --tokens 1024000 --batch-tokens 8192 \
        --variant dial --variant "untied shape.tied_embeddings=false"

A variant is a name and settings of pocket's stage `pretrain`. Without --variant it is the table of
docs/explanation/training.md: plain Muon, each of pocket's three changes alone, all of them, and all of them with 5 %
fewer tokens. Each run is the stage's own worker on one thread; as many run side by side as --parallel says, which
changes no number but seconds. A row: the mean of the held-out bits per byte over the seeds, the difference to the first
variant with its 95 % interval by pairs of one seed, and CPU-seconds.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nanodag.config.kinds import find_kind
from nanodag.config.resolve import resolve
from nanodag.evaluation.intervals import UNBOUNDED, student
from nanodag.worker.job import Job, write_job
from nanodag.worker.launch import worker_environment

PROJECT = Path(__file__).resolve().parents[1]
PLAIN = {"name": "muon", "learning_rate": 0.02, "momentum_warmup": 0}


def main() -> None:
    options = _options()
    options.folder.mkdir(parents=True, exist_ok=True)
    variants = {text.split()[0]: text.split()[1:] for text in options.variant or _table(options)}
    tokenizer = options.folder / f"tokenizer-{options.vocabulary}"
    _train("tokenizer", tokenizer, {}, [f"tokenizer.vocabulary={options.vocabulary}"], 2)
    runs = [(name, seed) for seed in options.seeds for name in variants]
    with ThreadPoolExecutor(options.parallel) as pool:
        results = list(pool.map(lambda run: _run(options, *run, variants[run[0]], tokenizer), runs))
    found = dict(zip(runs, results, strict=True))
    first = next(iter(variants))
    print("| variant | settings | bits per byte | against the first | CPU-s |\n|---|---|---|---|---|")
    for name, settings in variants.items():
        scores = [found[name, seed]["bits"] for seed in options.seeds]
        differences = [found[name, seed]["bits"] - found[first, seed]["bits"] for seed in options.seeds]
        spread = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
        mean = statistics.mean(differences)
        interval = student(mean, spread, len(differences) - 1, UNBOUNDED)[1] - mean
        cpu = statistics.median(found[name, seed]["cpu_s"] for seed in options.seeds)
        against = f"{mean:+.4f} ± {interval:.4f}"
        print(f"| {name} | {' '.join(settings)} | {statistics.mean(scores):.4f} | {against} | {cpu:.0f} |", flush=True)


def _table(options: argparse.Namespace) -> list[str]:
    """Plain Muon; the embeddings' rate, the momentum's warm-up and second moments of rows, each alone; all three."""

    def plain(*but: str) -> str:
        return " ".join(f"optimizer.{key}={value}" for key, value in PLAIN.items() if key not in but)

    fewer = int(0.95 * options.tokens) // options.batch_tokens * options.batch_tokens
    return [
        f"muon {plain()}",
        f"embeddings {plain('learning_rate')}",
        f"momentum {plain('momentum_warmup')}",
        f"normuon {plain('name')}",
        "pocket",
        f"fewer horizon_tokens={fewer}",
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", metavar="'NAME SETTING=VALUE ...'")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=3_000_000, help="the horizon")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/nanodag-recipe"), help="what is done there is kept")
    return parser.parse_args()


def _run(options: argparse.Namespace, name: str, seed: int, settings: list[str], tokenizer: Path) -> dict[str, Any]:
    changed = f"-{zlib.crc32(' '.join(settings).encode()):08x}" if settings else ""
    label = f"depth{options.depth}-{options.tokens}-{options.batch_tokens}-{name}-{seed}{changed}"
    shape = {"depth": options.depth, "horizon_tokens": options.tokens, "batch_tokens": options.batch_tokens}
    own = [f"pretrain.{'shape.depth' if key == 'depth' else key}={value}" for key, value in shape.items()]
    own += [f"seed={seed}", "pretrain.validation_tokens=262144", "pretrain.validation_every=100000"]
    own += ["pretrain.sample_prompts=[]", *(f"pretrain.{setting}" for setting in settings)]
    result = _train("pretrain", options.folder / label, {"tokenizer": tokenizer / "output"}, own, 1)
    print(f"{label}: {result['bits']:.4f}", file=sys.stderr, flush=True)
    return result


def _train(name: str, folder: Path, inputs: dict[str, Path], overrides: list[str], threads: int) -> dict[str, Any]:
    """Run a stage of pocket in a workspace, unless it was run there, and read its result."""
    if not (folder / "result.json").exists():
        stage = resolve(PROJECT / "pipeline.yaml", "pocket", overrides).pipeline.stages[name]
        folder.mkdir(parents=True, exist_ok=True)
        one = stage.resources.model_copy(update={"threads": threads, "device": "cpu"})
        job = Job(
            name=name, run="recipe", config=stage.model_copy(update={"resources": one}), inputs=inputs, workspace=folder
        )
        command = [sys.executable, "-W", "ignore", "-m", find_kind(stage.kind).module, str(write_job(job))]
        with (folder / "worker.log").open("ab") as out:
            subprocess.run(command, env=worker_environment(threads), stdout=out, stderr=out, check=True)
    result = json.loads((folder / "result.json").read_text())
    return {
        "bits": result["metrics"].get("validation_bits_per_byte", math.nan),
        "cpu_s": result["cost"].get("cpu_seconds", 0),
    }


if __name__ == "__main__":
    main()
