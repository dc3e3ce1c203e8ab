"""The midtrain stage."""

from prefect import task
from prefect.states import State

from nanodag.run.record import Run, StageResult
from tasks.stage_task import OPTIONS, stage_task


@task(name="midtrain", **OPTIONS)
def midtrain(name: str, run: Run, inputs: dict[str, StageResult], force: bool = False) -> State[StageResult]:
    """Teach a model the chat format on a large mixture (nanodag.train)."""
    return stage_task(name, run, inputs, force=force)
