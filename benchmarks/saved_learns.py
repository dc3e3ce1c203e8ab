"""What answers that exist are worth: offline RL, imitation and best of n beside RL, over seeds.

    python -m benchmarks.saved_learns --seeds 0 1 2 --store /tmp/saved-store --out saved.json

All stages begin at the SFT checkpoint of the preset best-of-n, and are asked its 400 held-out problems, greedily.
Differences are paired over these. Prints JSON a seed.

From answers that exist, without any of their own:
- offline: one pass over what the RL stage of pocket trained, in an order of its own, with `correction: tis`;
- offline_uncorrected: as that, each token as if it were on policy;
- offline_own: four passes over the answers of SFT itself that `select` drew, likewise;
- clone: one pass over the best answer to each prompt of that RL stage.

With as many sampled answers each, half of pocket's (46,080):
- fresh: 90 steps of 64 prompts;
- half_steps: 180 steps of 32 prompts.
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.gains import write_each
from benchmarks.pocket import PROJECT, artifact_of, nanodag, samples_of
from nanodag.evaluation.paired import paired
from nanodag.store import Store

BASE, PRESET = "best-of-n", "saved"
METRIC = "exact_match"
VARIANTS = ("offline", "offline_uncorrected", "offline_own", "clone", "fresh", "half_steps")
PAIRS = (
    *(("sft", other) for other in ("rl", "best", *VARIANTS)),
    *(("best", "offline_own"), ("fresh", "half_steps")),
)


def variants(base: dict[str, Any], rl_records: str, own_records: str) -> dict[str, dict[str, Any]]:
    """The RL stages of VARIANTS. base: pocket's. The records are folders of rollouts."""

    def changed(num_steps: int, **rollout: Any) -> dict[str, Any]:
        return {**base, "num_steps": num_steps, "rollout": {**base["rollout"], **rollout}}

    def of_files(num_steps: int, records: str, **rollout: Any) -> dict[str, Any]:
        return changed(num_steps, source=f"file:{records}/step-*.jsonl", max_staleness=0, **rollout)

    def uncorrected(stage: dict[str, Any]) -> dict[str, Any]:
        return {**stage, "algorithm": {"correction": "none"}}

    offline = of_files(90, rl_records)
    stages = (
        *(offline, uncorrected(offline), of_files(44, own_records)),
        uncorrected(of_files(130, rl_records, clone={"best": 1})),
        *(changed(90), changed(180, prompts_per_step=32)),
    )
    return dict(zip(VARIANTS, stages, strict=True))


def write_presets(store: Store, run: str) -> Path:
    """A pipeline file with a preset that goes on with a run of BASE."""
    document = yaml.safe_load((PROJECT / "pipeline.yaml").read_text())
    pocket = document["presets"]["pocket"]["stages"]
    records = [str(store.verified(artifact_of(store, run, stage), "records") / "rollouts") for stage in ("rl", "best")]
    stages: dict[str, Any] = {"report": "drop"}
    for name, stage in variants(pocket["rl"], *records).items():
        stages |= {name: stage, f"eval_{name}": {**pocket["eval_rl"], "inputs": {"model": name}}}
    document["presets"][PRESET] = {"extends": BASE, "stages": stages}
    path = store.local / f"{run}.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def measure(seed: int, folder: Path, benchmark: str, port: int) -> dict[str, Any]:
    """One seed: its run of BASE, the variants, and what came out."""
    store = Store(folder)
    first, second = f"{BASE}-seed{seed}", f"{PRESET}-seed{seed}"
    nanodag(folder, "run", f"server.port={port}", "--preset", BASE, "--name", first, f"seed={seed}")
    file = str(write_presets(store, first))
    nanodag(folder, "run", "--file", file, f"server.port={port}", "--preset", PRESET, "--name", second, f"seed={seed}")
    by_stage = {name: samples_of(store, second, f"eval_{name}", benchmark) for name in ("sft", "rl", "best", *VARIANTS)}
    made = {name: artifact_of(store, second, name) for name in ("rl", "best", *VARIANTS)}
    gains = {f"{after} over {before}": paired(by_stage[before], by_stage[after], METRIC) for before, after in PAIRS}
    return {
        "seed": seed,
        "accuracy": {name: fmean(item["scores"][METRIC] for item in items) for name, items in by_stage.items()},
        "gains": {name: found.as_json() for name, found in gains.items()},
        "sampled_tokens": {name: one.cost.get("sampled_tokens", 0) for name, one in made.items()},
        "trained_tokens": {name: one.cost["tokens"] for name, one in made.items()},
        "cpu_s": {name: one.cost["cpu_seconds"] for name, one in made.items()},
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--store", type=Path, required=True)
    options.add_argument("--benchmark", default="sort")
    options.add_argument("--port", type=int, default=4350, help="of the Prefect server")
    options.add_argument("--out", type=Path, required=True, help="where the results go, as JSON")
    given = options.parse_args()
    store = given.store.absolute()
    write_each((measure(seed, store, given.benchmark, given.port) for seed in given.seeds), given.out)


if __name__ == "__main__":
    main()
