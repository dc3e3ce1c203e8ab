"""What an RL stage learned over the SFT before it, over seeds: what benchmarks of agents and environments share.

A model is what the stage `sft` of pocket left, under its seed. A further SFT teaches it how calls look, then RL trains
it. RL's first evaluation and its last answer the same items greedily; the difference is paired.
"""

import argparse
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.pocket import artifact_of, nanodag
from nanodag.evaluation.paired import paired
from nanodag.rl.rollouts.rollout import main_sequences, read_rollouts
from nanodag.store import Artifact, Store


def stages_of(calls: str, rl: dict[str, Any]) -> dict[str, Any]:
    """Stages of a pipeline: the model, SFT on the conversations of the source `calls`, and RL after it."""
    return {
        "model": {"kind": "import", "model": "file:/set/by/an/override"},
        "sft": {
            "kind": "sft",
            "inputs": {"model": "model"},
            "data": [
                {"url": calls, "adapter": "messages", "held_out": 0.1},
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
        "rl": {"kind": "rl", "inputs": {"model": "sft"}, **rl},
    }


def parser(description: str | None, *, steps: int, port: int) -> argparse.ArgumentParser:
    """The options that these benchmarks share. steps, port: the defaults."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", required=True, metavar="SEED=FOLDER")
    made.add_argument("--store", type=Path, required=True)
    made.add_argument("--steps", type=int, default=steps)
    made.add_argument("--port", type=int, default=port, help="of the Prefect server")
    made.add_argument("--out", type=Path, required=True, help="where the results go, as JSON")
    return made


def learn(name: str, stages: dict[str, Any], files: Path, arguments: argparse.Namespace) -> None:
    """Run the stages under each seed, and say what was learned. files: the folder of the modules that they name."""
    store = arguments.store.absolute()
    shutil.copytree(files, store / "pipeline", dirs_exist_ok=True)
    file = write_pipeline(store / "pipeline", name, stages, arguments.port)

    def measure(given: str) -> dict[str, Any]:
        seed, _, model = given.partition("=")
        run = f"{name}-seed{seed}"
        nanodag(store, "run", "--file", str(file), "--name", run, f"seed={seed}", f"model.model=file:{model}")
        return {"seed": int(seed), **learned(Store(store), artifact_of(Store(store), run, "rl"))}

    write_each(map(measure, arguments.models), arguments.out)


def write_pipeline(folder: Path, preset: str, stages: dict[str, Any], port: int) -> Path:
    """A pipeline file of one preset."""
    file = folder / "pipeline.yaml"
    presets = {preset: {"description": "Made by a benchmark.", "stages": stages}}
    file.write_text(yaml.safe_dump({"default": preset, "server": {"port": port}, "presets": presets}, sort_keys=False))
    return file


def write_each(results: Iterable[dict[str, Any]], out: Path) -> None:
    """Print each result when it is there, and keep all so far in a file."""
    known = []
    for result in results:
        known.append(result)
        print(json.dumps(result), flush=True)
        out.write_text(json.dumps(known, indent=1))


def learned(store: Store, rl: Artifact) -> dict[str, Any]:
    """The mean rewards of an RL stage's first evaluation and its last, their paired difference with its 95 % interval,
    and what it took."""
    records = store.verified(rl, "records") / "rollouts"
    first, *_, last = sorted(records.glob("eval-????????.jsonl"))
    found = paired(rewards_in(first), rewards_in(last), "reward")
    trained = [one for path in sorted(records.glob("step-????????.jsonl")) for one in read_rollouts(path)]
    return {
        "sft": found.value_a,
        "rl": found.value_b,
        "gain": found.difference,
        "low": found.low,
        "high": found.high,
        "items": found.num_items,
        "trained_samples": len(main_sequences(trained)),
        "trained_sequences": len(trained),
        "cpu_s": rl.cost.get("cpu_seconds"),
    }


def rewards_in(path: Path) -> list[dict[str, Any]]:
    """An evaluation's rewards, as `paired` takes them; a sample that failed has 0."""
    samples = main_sequences(read_rollouts(path))
    return [{"id": one.prompt_id, "scores": {"reward": one.reward or 0.0}} for one in samples]
