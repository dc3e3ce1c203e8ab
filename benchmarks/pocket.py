"""The pocket preset over seeds: time, memory, what the base model learned, and what RL gained over SFT and a control.

    python -m benchmarks.pocket --seeds 0 1 2 --store /tmp/pocket-store

The control continues supervised training from the same SFT checkpoint, on the same data, for as many tokens as cost
the CPU-seconds that the RL stage spent (by the SFT stage's own CPU-seconds a token; when it turns out cheaper it is
made again, longer), and keeps its best weights by validation. Differences are paired over the same held-out problems.
Prints JSON a seed, and writes all to --out.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from tokenizers import Tokenizer

from benchmarks.ngrams import bigram_bits, count_ngrams, unigram_bits
from nanodag.data.adapters import open_adapter
from nanodag.data.config import SourceConfig
from nanodag.data.opening import Part, open_part
from nanodag.evaluation.paired import paired
from nanodag.store import Artifact, Store

PROJECT = Path(__file__).resolve().parents[1]
DISCOUNTS = (0.5, 0.6, 0.7, 0.8, 0.9)
MAX_CONTROLS = 3
ENOUGH = 0.98  # of RL's CPU-seconds; a control that spent less is made again, longer


class Memory(threading.Thread):
    """Samples, every two seconds, the sum of the proportional set sizes of all processes that work for one store."""

    def __init__(self, store: Path) -> None:
        super().__init__(daemon=True)
        self.store = store
        self.peak_bytes = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(2.0):
            self.peak_bytes = max(self.peak_bytes, sum(self._sizes()))

    def _sizes(self) -> Iterator[int]:
        for process in psutil.process_iter():
            try:
                if process.environ().get("NANODAG_STORE") == str(self.store):  # inherited by all that a run starts
                    yield process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue


def nanodag(store: Path, command: str, *arguments: str) -> float:
    """Run a command of `nanodag` and return its seconds; raises CalledProcessError when it fails."""
    began = time.monotonic()
    line = [str(Path(sys.prefix) / "bin" / "nanodag"), command, *arguments]
    subprocess.run(line, check=True, env={**os.environ, "NANODAG_STORE": str(store)}, cwd=PROJECT)
    return time.monotonic() - began


def with_control(folder: Path) -> Path:
    """A pipeline file in which pocket continues with SFT beside RL."""
    document = yaml.safe_load((PROJECT / "pipeline.yaml").read_text())
    stages = document["presets"]["pocket"]["stages"]
    control = {**stages["sft"], "inputs": {"model": "sft"}, "patience": 1_000_000}
    evaluation = {**stages["eval_sft"], "inputs": {"model": "control"}}
    document["presets"]["control"] = {
        "extends": "pocket",
        "stages": {"control": control, "eval_control": evaluation, "report": "drop"},
    }
    path = folder / "control.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def artifact_of(store: Store, run: str, stage: str) -> Artifact:
    """The artifact that a run's stage took."""
    found = store.read_run(run).stages[stage].artifact
    assert found is not None, f"stage {stage} of run {run} has made nothing"
    return store.attempt(*found)


def seconds_of(store: Store, run: str) -> dict[str, float]:
    """What each stage of a run took when it was built."""
    made = {name: stage.made for name, stage in store.read_run(run).stages.items()}
    return {name: one.cost_of("seconds") for name, one in made.items() if one is not None and "seconds" in one.cost}


def floor(store: Store, run: str) -> dict[str, float]:
    """Bits per byte of unigram and bigram models, fitted on all training text, on the pretraining's held-out text.

    The bigram's discount is the best of DISCOUNTS on the held-out text itself, in its favour.
    """
    tokenizer = Tokenizer.from_file(str(store.materialize(artifact_of(store, run, "tokenizer")) / "tokenizer.json"))
    pretrain = artifact_of(store, run, "pretrain")
    source = SourceConfig.model_validate(pretrain.config["data"][0])
    adapt = open_adapter(source.adapter, source.url, "document", {})

    def texts(part: Part) -> Iterator[str]:
        opened, belongs = open_part(source, part, None)
        return (record["text"] for record in (adapt(*row) for row in opened.rows()) if belongs(record))

    def tokens(part: Part) -> Iterator[np.ndarray]:
        return (np.array(tokenizer.encode(text).ids) for text in texts(part))

    held_out = list(tokens("held_out"))
    num_bytes = sum(len(text.encode()) for text in texts("held_out"))
    counts = count_ngrams(tokens("train"), tokenizer.get_vocab_size())
    bigrams = [sum(bigram_bits(counts, d, discount=discount) for d in held_out) for discount in DISCOUNTS]
    return {
        "unigram": sum(unigram_bits(counts, d) for d in held_out) / num_bytes,
        "bigram": min(bigrams) / num_bytes,
    }


def samples_of(store: Store, run: str, stage: str, benchmark: str) -> list[dict[str, Any]]:
    """Per-item records of one benchmark."""
    folder = store.materialize(artifact_of(store, run, stage))
    return [json.loads(line) for line in (folder / "samples" / f"{benchmark}.jsonl").read_text().splitlines()]


def control_tokens(rl: Artifact, sft: Artifact) -> int:
    """Tokens that supervised training gets through in the CPU-seconds that RL spent, its start included."""
    start_share = sft.cost["start_seconds"] / (sft.cost["start_seconds"] + sft.cost["step_seconds"])
    start_cpu_s = sft.cost["cpu_seconds"] * start_share
    cpu_s_per_token = (sft.cost["cpu_seconds"] - start_cpu_s) / sft.cost["tokens"]
    return int((rl.cost["cpu_seconds"] - start_cpu_s) / cpu_s_per_token)


def measure(seed: int, folder: Path, benchmark: str, port: int) -> dict[str, Any]:
    """One seed: the run, its control, and what came out."""
    store = Store(folder)
    run = f"pocket-seed{seed}"
    unchanged = ("run", f"server.port={port}", "--preset", "pocket", f"seed={seed}")
    memory = Memory(folder)
    memory.start()
    wall_s = nanodag(folder, *unchanged, "--name", run)
    memory.done.set()
    warm_s = nanodag(folder, *unchanged)
    nanodag(folder, "server", "stop")
    cold_s = nanodag(folder, *unchanged)
    rl, sft = artifact_of(store, run, "rl"), artifact_of(store, run, "sft")
    step = int(sft.config["batch_tokens"])
    tokens = control_tokens(rl, sft)
    control_run = ""
    for number in range(MAX_CONTROLS):
        control_run = f"{run}-control{number}"
        nanodag(
            *(folder, "run", f"server.port={port}", "--preset", "control", "--file", str(with_control(folder))),
            *("--name", control_run, f"seed={seed}", f"control.horizon_tokens={tokens // step * step}"),
        )
        share = artifact_of(store, control_run, "control").cost["cpu_seconds"] / rl.cost["cpu_seconds"]
        if share >= ENOUGH:
            break
        tokens = int(tokens * 1.02 / share)
    by_stage = {
        "base": samples_of(store, run, "eval_base", benchmark),
        "mid": samples_of(store, run, "eval_mid", benchmark),
        "sft": samples_of(store, run, "eval_sft", benchmark),
        "control": samples_of(store, control_run, "eval_control", benchmark),
        "rl": samples_of(store, run, "eval_rl", benchmark),
    }
    metric = "exact_match"
    return {
        "seed": seed,
        "wall_s": wall_s,
        "second_run_s": {"server up": warm_s, "cold": cold_s},
        "peak_pss_gib": memory.peak_bytes / 2**30,
        "bits_per_byte": artifact_of(store, run, "pretrain").metrics,
        "floor": floor(store, run),
        "accuracy": {n: float(np.mean([item["scores"][metric] for item in items])) for n, items in by_stage.items()},
        "rl_over_sft": paired(by_stage["sft"], by_stage["rl"], metric),
        "rl_over_control": paired(by_stage["control"], by_stage["rl"], metric),
        "cpu_s": {
            "sft": sft.cost["cpu_seconds"],
            "rl": rl.cost["cpu_seconds"],
            "control": artifact_of(store, control_run, "control").cost["cpu_seconds"],
        },
        "seconds": seconds_of(store, run),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--benchmark", default="sort")
    parser.add_argument("--port", type=int, default=4310, help="of the Prefect server")
    parser.add_argument("--out", type=Path, default=Path("pocket.json"))
    arguments = parser.parse_args()
    arguments.store.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in arguments.seeds:
        results.append(measure(seed, arguments.store.absolute(), arguments.benchmark, arguments.port))
        arguments.out.write_text(json.dumps(results, indent=1, default=vars))
        print(json.dumps(results[-1], indent=1, default=vars), flush=True)


if __name__ == "__main__":
    main()
