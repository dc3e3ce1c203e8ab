"""What pocket's model learns in `boxes/boxes.py`, an environment of the `verifiers` package with a tool: held-out tasks
before RL and after it, over seeds.

    nanodag env install verifiers
    python -m benchmarks.verifiers_learns --store /tmp/verifiers-store \
        --models 0=MODEL_FOLDER 1=MODEL_FOLDER 2=MODEL_FOLDER

A model is what the stage `sft` of pocket left, under its seed. SFT first teaches it how calls look: to open one box,
and the other one now and then where it was empty. RL finds that it is worth to go on. Both evaluations run the
environment greedily on the same tasks; the difference is paired. Prints JSON a seed.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.pocket import artifact_of, nanodag
from nanodag.rl.rollouts.rollout import main_sequences, read_rollouts
from nanodag.store import Store

FILES = Path(__file__).with_name("boxes")
Z95 = 1.96


def pipeline(port: int, *, steps: int) -> dict[str, Any]:
    """The pipeline file: a model, SFT on the form of calls, RL in the environment."""
    stages = {
        "model": {"kind": "import", "model": "file:/set/by/an/override"},
        "sft": {
            "kind": "sft",
            "inputs": {"model": "model"},
            "data": [
                {"url": "python:box_numbers:calls?size=400&seed=1", "adapter": "messages", "held_out": 0.1},
                {"url": "python:nanodag.data.lists:sort?count=5&size=400&seed=1", "adapter": "problem"},
            ],
            "sequence_length": 128,
            "batch_tokens": 2048,
            "num_epochs": 10,
            "validation_every": 20,
            "patience": 15,
            "optimizer": {"matrix_lr": 0.01, "learning_rate": 0.0025, "weight_decay": 0.1},
            "schedule": {"warmup_fraction": 0.02, "decay_fraction": 0.5},
        },
        "rl": {
            "kind": "rl",
            "inputs": {"model": "sft"},
            "data": ["verifiers:boxes?size=20000&seed=2"],
            "sampler": {"max_batch": 128, "context": 64},
            "num_steps": steps,
            "rollout": {
                "generate": {"name": "verifiers:boxes", "options": {"agent.max_turns": 4, "at_once": 128}},
                "prompts_per_step": 12,
                "samples_per_prompt": 8,
                "max_new_tokens": 24,
            },
            "optimizer": {"learning_rate": 3e-4, "weight_decay": 0.0, "warmup_steps": 2},
            "evaluation": {
                "eval_every": steps,
                "eval_prompts": 200,
                "validation": ["verifiers:boxes?size=200&seed=9&held_out=true"],
            },
        },
    }
    return {
        "default": "boxes",
        "server": {"port": port},
        "presets": {"boxes": {"description": "An environment of verifiers with a tool.", "stages": stages}},
    }


def measure(seed: int, model: str, file: Path, folder: Path) -> dict[str, Any]:
    """One seed: its run, and what the environment said before and after."""
    run = f"boxes-seed{seed}"
    nanodag(folder, "run", "--file", str(file), "--name", run, f"seed={seed}", f"model.model=file:{model}")
    store = Store(folder)
    rl = artifact_of(store, run, "rl")
    files = sorted(
        path for path in (store.records(rl) / "rollouts").glob("eval-*.jsonl") if ".answers" not in path.name
    )
    before, after = (
        {one.prompt_id: one.reward or 0.0 for one in main_sequences(read_rollouts(path))}
        for path in (files[0], files[-1])
    )
    gains = np.array([after[prompt] - before[prompt] for prompt in before])
    error = float(gains.std(ddof=1) / np.sqrt(len(gains)))
    return {
        "seed": seed,
        "sft": float(np.mean(list(before.values()))),
        "rl": float(np.mean(list(after.values()))),
        "gain": float(gains.mean()),
        "low": float(gains.mean() - Z95 * error),
        "high": float(gains.mean() + Z95 * error),
        "tasks": len(gains),
        "cost": dict(rl.cost),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, metavar="SEED=FOLDER")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--port", type=int, default=4340, help="of the Prefect server")
    parser.add_argument("--out", type=Path, default=Path("verifiers_learns.json"))
    arguments = parser.parse_args()
    work = arguments.store / "pipeline"
    shutil.copytree(FILES, work, dirs_exist_ok=True)
    file = work / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline(arguments.port, steps=arguments.steps)))
    results = []
    for given in arguments.models:
        seed, _, model = given.partition("=")
        results.append(measure(int(seed), model, file, arguments.store))
        print(json.dumps(results[-1]), flush=True)
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
