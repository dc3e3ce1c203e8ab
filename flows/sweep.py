"""Many values of a stage's options as one DAG: what points have in common is one stage of it.

tokenizer ─> pretrain ─> sft-1 ─> eval_sft-1 ┐
                   └───> sft-2 ─> eval_sft-2 ┴─> comparison
"""

from typing import Any

from prefect.futures import wait
from prefect.states import Completed, Failed, State

from nanodag.errors.words import counted
from nanodag.sweep.halving import Halving
from nanodag.sweep.sweep_run import begin_sweep, find_built
from tasks.stage_task import ending, flow_of_stages, outcome, own_flow_run, start_all
from tasks.sweep import comparison


@flow_of_stages(flow_run_name="{name}")
def sweep(
    name: str,
    grid: tuple[str, ...] = (),
    points: tuple[tuple[str, ...], ...] = (),
    stage: str = "",
    at_once: int = 1,
    predict: int = 0,
    halving: int = 0,
    preset: str = "auto",
    overrides: tuple[str, ...] = (),
    file: str = "",
) -> State[Any]:
    """Run a stage with many settings, sharing what comes before it, and compare.

    Args:
        name: the sweep's name; the name of one that was stopped or failed resumes it
        grid: an option and its values each, as in sft.num_epochs=[1,2]; every combination is a point
        points: lists of dotted.name=value; with a grid, every combination of both
        stage: what is compared; empty for the last stage that a point sets an option of
        at_once: how many stages that train may be under way together
        predict: the depth that a scaling law of the points is to predict; 0 for no law
        halving: ends points early that are not among the best 1/halving as far as they have come; 0 for none
        preset: a preset of the pipeline file; auto takes the file's default
        overrides: dotted.name=value, for all points
        file: the pipeline file; empty for the one that is served
    """
    arguments = {"file": file, "preset": preset, "overrides": overrides}
    points_of = {"grid": grid, "points": points, "stage": stage, "predict": predict}
    made, run = begin_sweep(name, flow_run=own_flow_run(), **points_of, **arguments)
    with ending(run):
        results = find_built(run)
        num_found, run.to_do = len(results), [s for s in run.to_do if s not in results]
        run.at_once, futures = at_once, {}
        judge = Halving(made, run, results, keep=halving) if halving else None
        if judge is not None:
            run.to_do, run.on_metrics = judge.left(run), judge
        start_all(run, futures, at_once=at_once)
        if judge is not None:
            wait(list(futures.values()))
            run.to_do = judge.left(run)
        stages = outcome(run.to_do, {stage: futures[stage] for stage in run.to_do if stage in futures})
        results |= {s: future.result() for s, future in futures.items() if future.state.is_completed()}
        compared = comparison(made, run, results, return_state=True)
    failed = [state for state in (stages, compared) if not state.is_completed()]
    if failed:
        return Failed(message="\n".join(state.message or "" for state in failed))
    num_points, num_stages = counted(len(made.points), "point"), counted(len(results), "stage")
    num_early = sum(judge is not None and point.stages[made.stage] in judge.ended for point in made.points)
    early = f", {counted(num_early, 'point')} ended early" if num_early else ""
    return Completed(message=f"{num_points}, {num_found} of {num_stages} found in the store{early}")
