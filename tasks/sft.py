"""The sft stage."""

from prefect import task
from prefect.states import State

from nanodag.run.record import Run, StageResult
from tasks.stage_task import OPTIONS, stage_task


@task(name="sft", **OPTIONS)
def sft(name: str, run: Run, inputs: dict[str, StageResult], force: bool = False) -> State[StageResult]:
    """Fine-tune a model on conversations (nanodag.train)."""
    return stage_task(name, run, inputs, force=force)
