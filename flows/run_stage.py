"""One stage of a run, alone: on what the run's record says its inputs are."""

from prefect import flow
from prefect.states import State
from prefect.task_runners import ThreadPoolTaskRunner

from tasks.notify import tell
from tasks.run_summary import concluded
from tasks.stage_task import begin_again, ending, inputs_of, outcome, submit, with_reason


@flow(
    name="run_stage",
    flow_run_name="{name}-{stage}",
    task_runner=ThreadPoolTaskRunner(max_workers=2),
    on_failure=[tell],
    on_crashed=[tell],
)
@with_reason
def run_stage(name: str, stage: str, overrides: tuple[str, ...] = (), force: bool = False) -> State:
    """Run one stage of a run whose inputs are there already.

    Args:
        name: the run, as nanodag status lists it
        stage: its stage
        overrides: dotted.name=value for this stage, on top of the run's
        force: build it again though the store has it; the new attempt is the one that counts
    """
    run = begin_again(name, stage=stage, overrides=overrides)
    futures = {}
    with ending(run):
        inputs = inputs_of(run, stage, futures)
        if inputs is not None:
            futures[stage] = submit(run, stage, inputs, force=force)
        return concluded(run, outcome(run.to_do, futures))
