"""A tiny vision-language model learns from random weights to count squares in pictures: SFT, then RL on right answers.

    python -m benchmarks.picture_problems [--seeds 1 2 3] [--folder FOLDER]

The model is of Qwen2.5-VL's type, 1.2 M parameters, in its class of transformers. The pipeline is written into the
folder and run as by `nanodag run`: report and `nanodag rollouts RUN --file FOLDER/pipeline.yaml` show pictures. A row:
right answers to 200 held-out pictures of 1 to 4 squares, after SFT on 540 of 1 to 3 and 60 of 1 to 4, and after RL; and
minutes. By chance one in four is right.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

import nanodag
from tests.model.vision_models import make_vision

SOURCE = "python:nanodag.data.picture_problems:count_shapes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--folder", type=Path, default=None, help="default: a new one below the temporary folder")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="pictures-"))).absolute()
    print(f"{folder / 'pipeline.yaml'}\n| seed | after SFT | after RL | minutes |\n|---|---|---|---|", flush=True)
    for seed in options.seeds:
        before, after, seconds = run(folder, seed)
        print(f"| {seed} | {before:.1%} | {after:.1%} | {seconds / 60:.1f} |", flush=True)


def run(folder: Path, seed: int) -> tuple[float, float, float]:
    """Right answers after SFT and after RL, and the run's seconds."""
    if not (model := folder / f"model-{seed}").exists():
        make_vision("qwen2_5_vl", model, width=128, layers=3, noise=0.0, seed=seed)
    (file := folder / "pipeline.yaml").write_text(yaml.safe_dump(pipeline(folder, model), sort_keys=False))
    begin = time.monotonic()
    done = nanodag.run("pictures", f"seed={seed}", file=file, name=f"pictures-{seed}")
    lines = done["rl"].metrics()
    rates = [rate for rate in lines["eval_pass_rate"] if rate == rate]
    return rates[0], rates[-1], time.monotonic() - begin


def pipeline(folder: Path, model: Path) -> dict[str, Any]:
    """Import, SFT, RL and a report."""

    def data(size: int, seed: int, most: int = 4, **fields: Any) -> list[dict[str, Any]]:
        return [{"url": f"{SOURCE}?size={size}&seed={seed}&most={most}", "adapter": "problem", **fields}]

    stages: dict[str, Any] = {
        "base": {"kind": "import", "model": f"file:{model}", "model_code": "transformers"},
        "sft": {
            "kind": "sft", "inputs": {"model": "base"}, "data": data(600, 1, most=3, held_out=0.1) + data(60, 4),
            "sequence_length": 128,
            "batch_tokens": 2048, "num_epochs": 45, "validation_every": 50,
            "optimizer": {"name": "adamw", "learning_rate": 1e-3},
        },
        "rl": {
            "kind": "rl", "inputs": {"model": "sft"}, "data": data(20000, 2), "num_steps": 60,
            "rollout": {"prompts_per_step": 32, "samples_per_prompt": 8, "max_new_tokens": 4},
            "sampler": {"context": 64}, "optimizer": {"learning_rate": 1e-4}, "log_responses": 4,
            "evaluation": {"eval_every": 20, "eval_prompts": 200, "validation": data(200, 3)},
        },
        "report": {"kind": "report", "inputs": ["sft", "rl"]},
    }  # fmt: skip
    description = "A tiny vision-language model learns from random weights to count squares in pictures."
    preset = {"description": description, "nightly": {"enabled": False}, "stages": stages}
    return {"default": "pictures", "store": {"url": str(folder / "store")}, "presets": {"pictures": preset}}


if __name__ == "__main__":
    main()
