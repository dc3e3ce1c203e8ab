"""The rl stage."""

from prefect import task
from prefect.states import State

from nanodag.run.record import Run, StageResult
from tasks.stage_task import OPTIONS, stage_task


@task(name="rl", **OPTIONS)
def rl(name: str, run: Run, inputs: dict[str, StageResult], force: bool = False) -> State[StageResult]:
    """Train a model on rewards: a sampler, a trainer and their controller (nanodag.rl)."""
    return stage_task(name, run, inputs, force=force)
