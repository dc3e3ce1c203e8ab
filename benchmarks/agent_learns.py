"""What pocket's model learns by the agent of `agent/range_agent.py`, written with the `openai` package: held-out
problems before RL and after it, over seeds.

    python -m venv /tmp/agents-env && /tmp/agents-env/bin/pip install openai
    python -m benchmarks.agent_learns --python /tmp/agents-env/bin/python --store /tmp/agent-store \
        --models 0=MODEL_FOLDER 1=MODEL_FOLDER 2=MODEL_FOLDER

A model is what the stage `sft` of pocket left, under its seed. SFT first teaches it how the agent's calls look. Both
evaluations let the agent run greedily on the same problems; the difference is paired. Prints JSON a seed.
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

FILES = Path(__file__).with_name("agent")
Z95 = 1.96


def pipeline(python: str, port: int, *, steps: int) -> dict[str, Any]:
    """The pipeline file: a model, SFT on the form of calls, RL by the agent."""
    held_out = {"url": "python:range_problems:problems?size=200&seed=9&held_out=true", "adapter": "problem"}
    agent = {"python": python, "seconds": 120.0, "max_calls": 8, "at_once": 4}
    stages = {
        "model": {"kind": "import", "model": "file:/set/by/an/override"},
        "sft": {
            "kind": "sft",
            "inputs": {"model": "model"},
            "data": [
                {"url": "python:range_problems:calls?size=400&seed=1", "adapter": "messages", "held_out": 0.1},
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
            "data": [{"url": "python:range_problems:problems?size=20000&seed=2", "adapter": "problem"}],
            "reward": "reported",
            "sampler": {"max_batch": 64, "context": 96},
            "num_steps": steps,
            "rollout": {
                "generate": {"name": "agent:range_agent:answer_range", "options": agent},
                "prompts_per_step": 16,
                "samples_per_prompt": 8,
                "max_new_tokens": 24,
            },
            "optimizer": {"learning_rate": 3e-4, "weight_decay": 0.0, "warmup_steps": 3},
            "evaluation": {"eval_every": 30, "eval_prompts": 200, "validation": [held_out]},
        },
    }
    return {
        "default": "agent",
        "server": {"port": port},
        "presets": {"agent": {"description": "An agent with a tool and a subagent.", "stages": stages}},
    }


def measure(seed: int, model: str, file: Path, folder: Path) -> dict[str, Any]:
    """One seed: its run, and what the agent answered before and after."""
    run = f"agent-seed{seed}"
    nanodag(folder, "run", "--file", str(file), "--name", run, f"seed={seed}", f"model.model=file:{model}")
    store = Store(folder)
    rl = artifact_of(store, run, "rl")
    records = store.records(rl) / "rollouts"
    files = sorted(records.glob("eval-????????.jsonl"))
    before, after = (
        {one.prompt_id: one.reward or 0.0 for one in main_sequences(read_rollouts(path))}
        for path in (files[0], files[-1])
    )
    gains = np.array([after[prompt] - before[prompt] for prompt in before])
    error = float(gains.std(ddof=1) / np.sqrt(len(gains)))
    trained = [one for path in records.glob("step-????????.jsonl") for one in read_rollouts(path)]
    return {
        "seed": seed,
        "sft": float(np.mean(list(before.values()))),
        "rl": float(np.mean(list(after.values()))),
        "gain": float(gains.mean()),
        "low": float(gains.mean() - Z95 * error),
        "high": float(gains.mean() + Z95 * error),
        "problems": len(gains),
        "trained_samples": len(main_sequences(trained)),
        "trained_sequences": len(trained),
        "cpu_s": rl.cost.get("cpu_seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, metavar="SEED=FOLDER")
    parser.add_argument("--python", required=True, help="an interpreter that has the package openai")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--port", type=int, default=4330, help="of the Prefect server")
    parser.add_argument("--out", type=Path, default=Path("agent_learns.json"))
    arguments = parser.parse_args()
    work = arguments.store / "pipeline"
    shutil.copytree(FILES, work, dirs_exist_ok=True)
    file = work / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline(arguments.python, arguments.port, steps=arguments.steps)))
    results = []
    for given in arguments.models:
        seed, _, model = given.partition("=")
        results.append(measure(int(seed), model, file, arguments.store))
        print(json.dumps(results[-1]), flush=True)
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
