"""What RL on one task gains there and loses on another, setting by setting, in points.

    python -m benchmarks.forgetting --seeds 51 52 53 --store /tmp/forgetting

A run a seed: tokenizer, pretraining and SFT of preset `preferences`, which teach sorting and reversing, then an RL
stage on sorting for each of VARIANTS. Each is evaluated on 400 unseen problems of either task. Rows: the mean change
against SFT over the seeds, with its 95 % interval by Student's t over seeds. Runs are resumed by their name.
"""

import argparse
import copy
import math
import statistics
from pathlib import Path
from typing import Any

import yaml

import nanodag
from nanodag.evaluation.intervals import UNBOUNDED, student

PROJECT = Path(__file__).resolve().parents[1]
TASKS = {"sort": 'sort?count=5&size=400&seed=7&split="test"', "reverse": 'reverse?size=400&seed=7&split="test"'}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"algorithm": {"kl_coefficient": 0.1}},
    "rate": {"optimizer": {"learning_rate": 5e-5}},
    "lora": {"optimizer": {"learning_rate": 1e-3, "lora_rank": 8}},
    "mixture": {"data": [("sort?count=5&size=20000&seed=4", 0.8), ("reverse?size=20000&seed=4", 0.2)]},
    "mixture_kl": {
        "data": [("sort?count=5&size=20000&seed=4", 0.8), ("reverse?size=20000&seed=4", 0.2)],
        "algorithm": {"kl_coefficient": 0.1},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[51, 52, 53])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--store", type=Path, default=Path("/tmp/nanodag-forgetting"), help="what is done there is kept"
    )
    options = parser.parse_args()
    options.store.mkdir(parents=True, exist_ok=True)
    file = options.store / "forgetting.yaml"
    file.write_text(yaml.safe_dump(_pipeline(options.store / "store", options.variants), sort_keys=False))
    changes: dict[tuple[str, str], list[float]] = {}
    for seed in options.seeds:
        run = nanodag.run("forgetting", f"seed={seed}", file=str(file), name=f"forgetting-{seed}")
        before = _scores(run["eval_sft"])
        print(f"seed {seed}, SFT: " + ", ".join(f"{task} {value:.1f}" for task, value in before.items()), flush=True)
        for variant in options.variants:
            for task, value in _scores(run[f"eval_{variant}"]).items():
                changes.setdefault((variant, task), []).append(value - before[task])
    print("| settings | " + " | ".join(TASKS) + " | by seed |\n|---|" + "---|" * len(TASKS) + "---|")
    for variant in options.variants:
        cells = [_cell(changes[variant, task]) for task in TASKS]
        by_seed = "; ".join(", ".join(f"{change:+.1f}" for change in changes[variant, task]) for task in TASKS)
        print(f"| {variant} | {' | '.join(cells)} | {by_seed} |")


def _pipeline(store: Path, variants: list[str]) -> dict[str, Any]:
    shipped = yaml.safe_load((PROJECT / "pipeline.yaml").read_text())
    old = shipped["presets"]["preferences"]["stages"]
    benchmarks = [
        {
            "name": task,
            "form": "problems",
            "source": {"url": f"python:nanodag.data.lists:{source}", "adapter": "problem"},
        }
        for task, source in TASKS.items()
    ]

    def evaluation(model: str) -> dict[str, Any]:
        return {"kind": "eval", "inputs": {"model": model}, "benchmarks": benchmarks, "max_new_tokens": 24}

    stages = {name: old[name] for name in ("tokenizer", "pretrain", "sft")} | {"eval_sft": evaluation("sft")}
    for variant in variants:
        stage = copy.deepcopy(old["rl"]) | {"num_steps": 40}
        stage.pop("evaluation")
        for name, value in VARIANTS[variant].items():
            if name == "data":
                value = [
                    {"url": f"python:nanodag.data.lists:{source}", "adapter": "problem", "weight": weight}
                    for source, weight in value
                ]
            stage[name] = {**stage[name], **value} if isinstance(value, dict) else value
        stages |= {variant: stage, f"eval_{variant}": evaluation(variant)}
    return shipped | {
        "default": "forgetting",
        "store": {"url": str(store)},
        "presets": {"forgetting": {"nightly": {"enabled": False}, "stages": stages}},
    }


def _scores(stage: Any) -> dict[str, float]:
    return {row["benchmark"]: 100 * row["value"] for row in stage.scores().to_dict("records")}


def _cell(changes: list[float]) -> str:
    mean = statistics.mean(changes)
    spread = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan
    return f"{mean:+.1f} ± {student(mean, spread, len(changes) - 1, UNBOUNDED)[1] - mean:.1f}"


if __name__ == "__main__":
    main()
