"""The pretrain stage."""

from prefect import task
from prefect.states import State

from nanodag.run.record import Run, StageResult
from tasks.stage_task import OPTIONS, stage_task


@task(name="pretrain", **OPTIONS)
def pretrain(name: str, run: Run, inputs: dict[str, StageResult], force: bool = False) -> State[StageResult]:
    """Train a model on documents, from random weights or from a stage's model (nanodag.train)."""
    return stage_task(name, run, inputs, force=force)
