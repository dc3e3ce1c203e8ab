"""Tasks of a night: its evals, the trend page and the verdict."""

from collections.abc import Mapping
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.futures import PrefectFuture
from prefect.states import Completed, Failed, State

from nanodag.errors.words import counted
from nanodag.nightly.findings import NightFindings, conclude
from nanodag.nightly.nights import Night
from nanodag.run.record import StageResult
from tasks.stage_task import submit

EVENT = "nanodag.nightly.worse"
_OPTIONS: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}


def start_evals(night: Night) -> dict[str, PrefectFuture[StageResult]]:
    """Submit the night's stages: each eval as soon as its model is there; none for a model that cannot be had."""
    futures: dict[str, PrefectFuture[StageResult]] = {}
    for subject in night.subjects:
        model = subject.model
        if model is None:
            brought = futures[subject.input_name] = submit(night.run, subject.input_name, {})
            brought.wait()
            model = brought.result() if brought.state.is_completed() else None
        for stage in subject.evals if model is not None else ():
            futures[stage] = submit(night.run, stage, {"model": model})
    return futures


def evaluated(night: Night, futures: Mapping[str, PrefectFuture[StageResult]]) -> dict[str, StageResult]:
    evals = [stage for subject in night.subjects for stage in subject.evals if stage in futures]
    return {stage: futures[stage].result() for stage in evals if futures[stage].state.is_completed()}


@task(name="trend", **_OPTIONS)
def trend(night: Night, results: Mapping[str, StageResult]) -> NightFindings:
    """Compare with earlier nights; publish the page, and show its tables in Prefect's UI."""
    findings = conclude(night, results)
    if findings.num_scores:
        text = f"{findings.markdown}\nWith plots: `{findings.page}`\n"
        create_markdown_artifact(key="nightly-trend", markdown=text, description=f"Nightly evals, {findings.night}")
    return findings


@task(name="nothing got worse", **_OPTIONS)
def nothing_got_worse(found: NightFindings) -> State[Any]:
    """Fails, with an event, when a score is worse than last night's or the best by more than noise."""
    if not found.worse:
        return Completed(message=f"none of {counted(found.num_scores, 'score')} is worse by more than noise")
    get_run_logger().error("Worse by more than noise:\n%s", "\n".join(found.worse))
    resource = {"prefect.resource.id": f"nanodag.nightly.{found.night}", "prefect.resource.name": found.night}
    emit_event(EVENT, resource=resource, payload=found.as_json())
    return Failed(
        message="\n".join([f"{len(found.worse)} of {counted(found.num_scores, 'score')} got worse:", *found.worse])
    )
