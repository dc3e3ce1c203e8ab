"""The rollouts that an RL stage leaves in its records: a file of those that each step trained. No torch here."""

from collections.abc import Container
from pathlib import Path

from nanodag.errors import ConfigError


def saved_steps(folder: Path) -> dict[int, Path]:
    """By step, the files of the rollouts that were trained. folder: `rollouts` among a stage's records.

    Raises ConfigError for a folder that has none.
    """
    files = {path.stem.removeprefix("step-"): path for path in sorted(folder.glob("step-*.jsonl"))}
    if found := {int(step): path for step, path in files.items() if step.isdigit()}:
        return found
    raise ConfigError(
        f"saved_rollouts {folder} has no step-*.jsonl; name the folder `rollouts` in the records of an RL stage."
    )


def check_steps(files: Container[int], folder: Path, *, num_steps: int) -> None:
    """Raise ConfigError for a step that a folder lacks. files: by step."""
    missing = [step for step in range(1, num_steps + 1) if step not in files]
    if missing:
        raise ConfigError(
            f"saved_rollouts {folder} has no step {missing[0]}, and num_steps is {num_steps}; lower num_steps, or name "
            "the records of a stage of as many steps."
        )
