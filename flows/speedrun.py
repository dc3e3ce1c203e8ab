"""The whole pipeline: every stage of a preset in the order of its DAG.

    tokenizer -> pretrain -> midtrain -> sft -> rl -> report
                     \\           \\         \\      \\
                   eval(base)  eval(mid) eval(sft) eval(rl)     beside the next stage (on GPUs before it)

The DAG is a table in pipeline.yaml; what is drawn here is the one that comes with nanodag.
"""

from typing import Literal

from prefect.states import State

from flows.deployments import offer_runs
from nanodag.run.record import open_run
from tasks.stage_task import begin_again, concluded, ending, flow_of_stages, outcome, own_flow_run, start_all


@flow_of_stages(flow_run_name="{name}")
def speedrun(
    name: str,
    preset: str = "auto",
    overrides: tuple[str, ...] = (),
    file: str = "",
    begin_at: str = "",
    stale: Literal["keep", "build", "only"] = "keep",
    force: bool = False,
) -> State:
    """Run a pipeline, or what of it the store does not have yet.

    Args:
        name: the run's name; the name of a run that was stopped or failed resumes that run
        preset: a preset of the pipeline file; auto takes the file's default
        overrides: dotted.name=value, as in rl.learning_rate=2e-6
        file: the pipeline file; empty for the one that nanodag comes with
        begin_at: only this stage of a run that there is already, and what follows it; its preset and file are the run's
        stale: what becomes of a run's finished stages that stand on a result that was built again since: they are kept
            as they are, built again, or built again and, beside what is not finished, nothing else is
        force: build again what the store has; the new attempts are the ones that count
    """
    if begin_at or stale == "only":
        run = begin_again(name, begin_at=begin_at, stale=stale == "only", overrides=overrides)
    else:
        keeps_stale = stale == "keep" and not force
        arguments = {"file": file, "preset": preset, "overrides": overrides, "keeps_stale": keeps_stale}
        run = open_run(name, **arguments, flow_run=own_flow_run())
    futures = {}
    with ending(run):
        offer_runs(run.store)
        start_all(run, futures, force=force)
        return concluded(run, outcome(run.to_do, futures))
