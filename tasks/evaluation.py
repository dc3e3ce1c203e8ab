"""The eval stage."""

from prefect import task
from prefect.states import State

from nanodag.run.record import Run, StageResult
from tasks.stage_task import OPTIONS, stage_task


@task(name="eval", **OPTIONS)
def evaluation(name: str, run: Run, inputs: dict[str, StageResult], force: bool = False) -> State[StageResult]:
    """Score a model (nanodag.evaluation). Runs beside the next stage; only the report waits for it."""
    return stage_task(name, run, inputs, force=force)
