"""The import stage."""

from prefect import task
from prefect.states import State

from nanodag.run.record import Run, StageResult
from tasks.stage_task import OPTIONS, stage_task


@task(name="import", **OPTIONS)
def import_model(name: str, run: Run, inputs: dict[str, StageResult], force: bool = False) -> State[StageResult]:
    """Take an existing Hugging Face model into the store (nanodag.model.import_model)."""
    return stage_task(name, run, inputs, force=force)
