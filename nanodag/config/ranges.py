"""Numbers that a person would call possible. What can never work is refused by the schema; what lies outside of these
is most likely a slip, and is refused unless the pipeline names it in `unchecked`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nanodag.config.pipeline import Pipeline
from nanodag.errors import ConfigError
from nanodag.errors.words import nearest

YEAR_S = 366 * 24 * 3600.0
# Name of a field -> lowest and highest. Names are unique enough: a field called alike means alike.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("learning_rate", "learning_rate_minimum", "matrix_lr", "clip_low"), (0.0, 1.0)),
    "eps": (0.0, 0.1),
    "weight_decay": (0.0, 10.0),
    "temperature": (1e-3, 10.0),
    "eval_temperature": (0.0, 10.0),
    **dict.fromkeys(("clip_high", "kl_coefficient", "entropy_coefficient", "overlong_penalty"), (0.0, 100.0)),
    **dict.fromkeys(("sapo_positive", "sapo_negative", "dual_clip", "correction_cap"), (0.0, 1000.0)),
    **dict.fromkeys(
        ("value_clip", "coefficient", "opsm_limit", "mismatch_limit", "stale_mismatch_limit"), (0.0, 1000.0)
    ),
    "gradient_clipping": (0.0, 1e6),
    "lora_rank": (0, 8192),
    "lora_alpha": (0.0, 1e5),
    "reward": (0.0, 1e6),  # a weight of one
    "replicas": (0, 64),
    **dict.fromkeys(("threads", "reward_processes", "tensor_parallel", "sequence_parallel"), (1, 1024)),
    **dict.fromkeys(("nodes", "gpus_per_node"), (0, 10_000)),
    "num_ranks": (1, 100_000),
    **dict.fromkeys(("max_batch", "samples_per_prompt", "eval_samples", "num_samples", "num_fewshot"), (0, 1e6)),
    **dict.fromkeys(("width", "num_heads", "num_kv_heads", "head_width", "mlp_width"), (1, 1e6)),
    **dict.fromkeys(("sequence_length", "max_positions", "context", "max_new_tokens"), (1, 1e8)),
    **dict.fromkeys(("num_epochs", "epochs", "epochs_per_step", "tokens_per_parameter"), (0, 1e6)),
    **dict.fromkeys(("prompts_per_step", "over_sampling", "updates_per_step", "max_staleness"), (0, 1e8)),
    **dict.fromkeys(("batch_tokens", "micro_batch_tokens", "sync_bucket_bytes"), (1, 1e12)),
}
SECONDS = (0.01, YEAR_S)  # of whatever is called *_s
OTHERS = (-1e15, 1e15)
_FREE = ("options", "router_options", "template_options")  # of functions and programs, which check their own


def check_ranges(pipeline: Pipeline, file: Path, preset: str) -> None:
    """Raise ConfigError for the first number that is outside its range and not named in `unchecked`."""
    numbers = dict(numbers_in(pipeline))
    for name in pipeline.unchecked:
        if name not in numbers:
            near = nearest(name, numbers) or " Name it as messages do, as in rl.temperature."
            raise ConfigError(f"{file}, preset {preset!r}: unchecked: there is no number {name!r:.100}.{near}")
    for name, (value, (low, high)) in numbers.items():
        if not low <= value <= high and name not in pipeline.unchecked:
            raise ConfigError(
                f"{file}, preset {preset!r}: {name}: {value:g} is out of any usual range ({low:g} to {high:g}). Change "
                f"it; or, if it is meant, say so with unchecked=[{name}]."
            )


def check_lora(stage_name: str, rank: int, width: int, unchecked: tuple[str, ...]) -> None:
    """Raise ConfigError for adapters of a higher rank than the matrices that they are added to."""
    name = f"{stage_name}.optimizer.lora_rank"
    if rank > width and name not in unchecked:
        raise ConfigError(
            f"{name}: {rank} is above {width}, the width of the model, so adapters would be larger than "
            f"what they adapt. Lower it; or, if it is meant, say so with unchecked=[{name}]."
        )


def numbers_in(value: Any, name: str = "") -> Iterator[tuple[str, tuple[float, tuple[float, float]]]]:
    """Dotted name, value and range of every number in a pipeline; a stage's fields are named `stage.field`."""
    if isinstance(value, BaseModel):
        value = {field: getattr(value, field) for field in type(value).model_fields}
    if isinstance(value, dict):
        pairs = [(key, inner) for key, inner in value.items() if key not in _FREE]
        for key, inner in pairs:
            yield from numbers_in(inner, name if not name and key == "stages" else f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from numbers_in(inner, f"{name}.{number}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, (value, _range_of(name))


def _range_of(name: str) -> tuple[float, float]:
    parts = name.split(".")
    field = "reward" if parts[1:2] == ["reward"] and parts[-1] == "weight" else parts[-1]
    if field == "temperature" and "benchmarks" in parts:
        field = "eval_temperature"
    return RANGES.get(field, SECONDS if field.endswith("_s") else OTHERS)
