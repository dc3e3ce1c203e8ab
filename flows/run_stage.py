"""One stage of a run, alone: on what the run's record says its inputs are."""

from prefect.states import State

from tasks.stage_task import begin_again, concluded, ending, flow_of_stages, outcome, start


@flow_of_stages(flow_run_name="{name}-{stage}")
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
        start(run, stage, futures, force=force)
        return concluded(run, outcome(run.to_do, futures))
