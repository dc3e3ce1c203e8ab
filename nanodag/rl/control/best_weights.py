"""The weights of the best evaluated step, for a stage that leaves them (`keep: best:<metric>`). No torch here.

The trainer writes each set of weights that is to be evaluated as the folder that the stage would end with. It stays
until its score is known, and after that while no later one is better. A checkpoint has hard links to these folders:
they take no room twice, their bytes are verified with it, and they outlive whatever is removed here. So a stage that
was killed goes on with the best weights of its checkpoint.
"""

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path


class BestWeights:
    """Folders `policy-<step>` of weights. folder: of the stage, on the file system of its checkpoints; what a process
    before left there is removed."""

    def __init__(self, folder: Path, *, is_highest: bool) -> None:
        self._folder, self.is_highest = folder, is_highest
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def of(self, step: int) -> Path:
        """Where the weights of a step are, or are to be written."""
        return self._folder / f"policy-{step}"

    def prune(self, values: Mapping[int, float | None]) -> None:
        """Remove weights whose score is known and is not the best. values: scores by step."""
        best = best_step(values, is_highest=self.is_highest)
        for step in values:
            if step != best:
                shutil.rmtree(self.of(step), ignore_errors=True)

    def save(self, checkpoint: Path) -> None:
        """Link what there is into a checkpoint that is being written."""
        shutil.copytree(self._folder, checkpoint / self._folder.name, copy_function=os.link)

    def load(self, checkpoint: Path) -> None:
        """Go back to what a checkpoint has."""
        shutil.rmtree(self._folder)
        shutil.copytree(checkpoint / self._folder.name, self._folder, copy_function=os.link)

    def leave(self, values: Mapping[int, float | None], output: Path) -> int | None:
        """Make the best weights the stage's product; returns their step, None where no evaluation has a score."""
        best = best_step(values, is_highest=self.is_highest)
        if best is not None:
            shutil.rmtree(output, ignore_errors=True)  # of a process that was killed here
            shutil.copytree(self.of(best), output, copy_function=os.link)
        return best


def best_step(values: Mapping[int, float | None], *, is_highest: bool) -> int | None:
    """The step with the best score, the earliest of equal ones; None where there is no score."""
    known = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
    sign = 1 if is_highest else -1
    return min(known, key=lambda step: (-sign * known[step], step), default=None)


def is_patience_over(values: Mapping[int, float | None], *, patience: int, is_highest: bool) -> bool:
    """Whether the last `patience` evaluations, or more, came after the best one; never before there is a score."""
    best = best_step(values, is_highest=is_highest)
    return best is not None and sum(step > best for step in values) >= patience
