"""The shipped presets with two steps a stage at small widths: every stage on its own code path, in seconds."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

from nanodag.config import resolve
from nanodag.host.folders import PROJECT

SUPERVISED = {
    **{"sequence_length": 128, "batch_tokens": 512, "micro_batch_tokens": 256, "max_steps": 2, "compile": False},
    **{"validation_tokens": 512, "validation_every": 1, "checkpoint_every": 1, "log_every": 1},
}
CHANGES: dict[str, dict[str, Any]] = {
    "tokenizer": {"vocabulary": 600, "max_bytes": 200_000},
    "pretrain": {**SUPERVISED, "horizon_tokens": 1024, "shape": {"depth": 1, "max_positions": 256}},
    "midtrain": SUPERVISED,
    "sft": SUPERVISED,
    "preference": SUPERVISED,
    "reward_model": SUPERVISED,
    "rl": {"num_steps": 2, "checkpoint_every": 1},
    "select": {"num_steps": 2, "checkpoint_every": 1, "lowest_reward": 0.0},
    "eval": {"max_new_tokens": 8, "micro_batch_tokens": 512},
    "report": {},
    "import": {},
}


RL_SECTIONS: dict[str, dict[str, Any]] = {
    "rollout": {"prompts_per_step": 2, "over_sampling": 0, "samples_per_prompt": 2, "max_new_tokens": 8},
    "optimizer": {"micro_batch_tokens": 512, "precision": "fp32", "warmup_steps": 1},
    "evaluation": {"eval_every": 1, "eval_prompts": 2},
    "sampler": {"context": 192, "max_batch": 8, "precision": "fp32"},
}


def reduce_stages(stages: dict[str, Any]) -> None:
    """Shrink each stage of a pipeline, in place."""
    _raise_held_out(stages)
    for stage in stages.values():
        stage.update(CHANGES[stage["kind"]])
        stage["resources"] = {"num_ranks": 1, "threads": 1}
        for benchmark in stage.get("benchmarks", []):
            benchmark["limit"] = 11 if benchmark["name"] == "core" else 4  # more than CORE's worked examples
        sections = {"rl": RL_SECTIONS, "select": ("rollout", "sampler")}.get(stage["kind"], ())
        for section in sections:
            changes = RL_SECTIONS[section]
            for name in changes:
                stage.pop(name, None)  # as a file may have it: without its section
            stage.setdefault(section, {}).update(changes)
        if stage["kind"] == "select":  # of so many answers of a model that knows nothing, some end
            stage["rollout"].update(prompts_per_step=16, samples_per_prompt=32, max_new_tokens=24)
            if stage["pairs"] != "none":  # nothing is right, and a pair wants a difference
                stage["reward"] = "reduced_reward:longest"


def _raise_held_out(value: Any) -> None:
    """Have each source hold out a share of which a mirror of 40 rows, or a few pairs, have some."""
    if isinstance(value, dict):
        share = {"hub": 0.2, "input": 0.5}.get(str(value.get("url")).partition(":")[0])
        if share and isinstance(value.get("held_out"), float) and value["held_out"]:
            value["held_out"] = share
        value = list(value.values())
    for inner in value if isinstance(value, list | tuple) else ():
        _raise_held_out(inner)


def reduced_stages(preset: str, *, without: Collection[str] = (), overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The stages of a shipped preset, reduced. without: stages of which only the report knows. overrides: of the
    shipped one."""
    stages = resolve(PROJECT / "pipeline.yaml", preset, overrides).pipeline.model_dump(mode="json")["stages"]
    for name in without:
        del stages[name], stages["report"]["inputs"][name]
    reduce_stages(stages)
    return stages


def write_reduced(preset: str, path: Path, **how: Any) -> list[str]:
    """Write a pipeline file with one preset `reduced`, of `reduced_stages`; returns the names of its stages."""
    stages = reduced_stages(preset, **how)
    preset = {"stages": stages, "tracking": {"trackers": []}}  # TensorBoard is a second of imports a stage
    longest = 'def longest(prompt, completion):\n    """Characters."""\n    return float(len(completion))\n'
    (path.parent / "reduced_reward.py").write_text(longest)
    path.write_text(yaml.safe_dump({"default": "reduced", "presets": {"reduced": preset}}, sort_keys=False))
    return list(stages)
