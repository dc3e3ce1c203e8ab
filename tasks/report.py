"""The report stage."""

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.states import State

from nanodag.run.record import Run, StageResult
from tasks.stage_task import OPTIONS, stage_task


@task(name="report", **OPTIONS)
def report(name: str, run: Run, inputs: dict[str, StageResult], force: bool = False) -> State[StageResult]:
    """Write report.md and report.html (nanodag.report), and show the first in Prefect's UI."""
    state = stage_task(name, run, inputs, force=force)
    if not state.is_completed():
        return state
    result: StageResult = state.data
    text = (run.store.materialize(run.store.attempt(result.key, result.attempt)) / "report.md").read_text()
    create_markdown_artifact(key=f"report-{run.name}".lower().replace("_", "-").replace(".", "-"), markdown=text)
    return state
