"""The tokenizer stage."""

from prefect import task
from prefect.states import State

from nanodag.run.record import Run, StageResult
from tasks.stage_task import OPTIONS, stage_task


@task(name="tokenizer", **OPTIONS)
def tokenizer(name: str, run: Run, inputs: dict[str, StageResult], force: bool = False) -> State[StageResult]:
    """Train a tokenizer (nanodag.tokenizer.train)."""
    return stage_task(name, run, inputs, force=force)
