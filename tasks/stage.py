"""What every stage's task does: carry it out, and let Prefect see it.

The store decides what is done, so Prefect caches nothing: a finished stage's task returns in milliseconds, shown as
Cached. A worker that a signal ended, or that lost its sampler or the network, is started again after a while and goes
on from its checkpoint.
"""

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.futures import PrefectFuture
from prefect.runtime import deployment, flow_run
from prefect.states import Completed, Failed, State
from prefect.tasks import Task

from nanodag.errors import NanodagError, StageInterrupted, StageStopped
from nanodag.keeper import end_with_parent
from nanodag.kinds import KINDS
from nanodag.runs import Run, StageResult, open_run, recorded_inputs, recorded_run, served_store
from nanodag.stage import carry_out
from nanodag.words import counted
from tasks.pool import carry_out_in_pool

PROGRESS_EVERY_S = 2.0
RETRY_AFTER_S = [2.0, 30.0]
# As nanodag.worker sets it up.
_LOG_LINE = re.compile(r"\d\d:\d\d:\d\d (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<text>[\w.]+: .*)")


def may_pass(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """True for a failure that starting again may mend: a signal, sampler or network; never config, NaN or data."""
    return isinstance(state.result(raise_on_failure=False), StageInterrupted | ConnectionError | TimeoutError)


OPTIONS: dict[str, Any] = {
    "task_run_name": "{name}",
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retries": len(RETRY_AFTER_S),
    "retry_delay_seconds": RETRY_AFTER_S,
    "retry_condition_fn": may_pass,
}


def begin(name: str, *, file: str, preset: str, overrides: Sequence[str], only: tuple[str, ...] = ()) -> Run:
    """The run that this flow run carries out, and its record in the store."""
    return open_run(name, file=file, preset=preset, overrides=overrides, only=only, flow_run=own_flow_run())


def own_flow_run() -> str:
    """Prefect's id of the flow run that this process carries out; empty without one. Every flow asks for it before it
    begins anything: one that is served ends, from then on, with the process that serves."""
    if deployment.id:  # in a process of its own, started by the one that serves
        end_with_parent()
    return str(flow_run.id or "")


def begin_again(name: str, *, stage: str = "", begin_at: str = "", overrides: Sequence[str] = ()) -> Run:
    """A run that there is already, for one stage of it, or for one and all that follow it."""
    recorded = recorded_run(served_store(), name, stage=stage, begin_at=begin_at, overrides=overrides)
    return begin(name, file=recorded.file, preset=recorded.preset, overrides=recorded.overrides, only=recorded.stages)


@contextmanager
def ending(run: Run) -> Iterator[None]:
    """Leave no worker behind and a true record, however the flow ends."""
    try:
        yield
    finally:
        run.stop.set()  # tells workers that are still there, after a cancel, to leave a checkpoint and end
        run.close()


def inputs_of(run: Run, stage: str, futures: Mapping[str, PrefectFuture[StageResult]]) -> dict[str, StageResult] | None:
    """What a stage takes, waited for; None when one of its inputs did not come about, and the stage needs it.

    Inputs from stages that are not carried out this time are those of the run's record.
    """
    wanted = run.pipeline.stages[stage].inputs
    found = recorded_inputs(run, stage, [label for label, source in wanted.items() if source not in run.to_do])
    for label, source in wanted.items():
        if source in futures:
            futures[source].wait()
            if futures[source].state.is_completed():
                found[label] = futures[source].result()
    missing = [source for label, source in wanted.items() if label not in found]
    if missing and not (found and KINDS[run.pipeline.stages[stage].kind].takes_what_exists):
        run.note(stage, state="not run", reason=f"needs {', '.join(missing)}")
        return None
    return found


def outcome(stages: Sequence[str], futures: Mapping[str, PrefectFuture[StageResult]]) -> State[Any]:
    """How a flow ends, once all its stages have: Failed with the reason of each stage that did, or Completed."""
    reasons = []
    for stage, future in futures.items():
        future.wait()
        if not future.state.is_completed():
            reasons.append(f"{stage}: {future.state.result(raise_on_failure=False) or future.state.name}")
    not_run = [stage for stage in stages if stage not in futures]
    if not_run:
        reasons.append(f"Not run, for want of their inputs: {', '.join(not_run)}.")
    if reasons:
        return Failed(message="\n".join(reasons))
    num_found = sum(future.result().was_found for future in futures.values())
    return Completed(message=f"{counted(len(futures), 'stage')}, {num_found} of them found in the store")


def stage_task(name: str, run: Run, inputs: Mapping[str, StageResult], *, force: bool) -> State[StageResult]:
    """Carry out a stage, and show what comes of it."""
    logger = get_run_logger()
    progress = _Progress(name)

    def on_line(line: str) -> None:
        if found := _LOG_LINE.fullmatch(line):  # Prefect writes time and level itself
            logger.log(logging.getLevelNamesMapping()[found["level"]], found["text"])
        else:
            logger.info(line)

    try:
        is_sent = run.pipeline.stages[name].resources.work_pool != "none" and not run.is_joined
        send = (lambda: carry_out_in_pool(name, run, inputs, force=force)) if is_sent else None
        result = carry_out(run, name, inputs, force=force, on_line=on_line, on_metrics=progress, send=send)
    except NanodagError as error:
        if not isinstance(error, StageStopped):
            _show_failure(run, name, error)
        raise
    if result.was_found:
        return Completed(name="Cached", message=f"found in the store: {result.key[:12]}", data=result)
    progress.finish()
    _show_result(run, result)
    return Completed(message=f"published {result.key[:12]}, attempt {result.attempt}", data=result)


class _Progress:
    """A stage's progress bar in the UI, moved at most every PROGRESS_EVERY_S."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._artifact: Any = None
        self._moved = 0.0

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        total, now = metrics.get("total"), time.monotonic()
        if not total or now - self._moved < PROGRESS_EVERY_S:
            return
        self._moved = now
        self._show(min(100.0, 100.0 * float(metrics["step"]) / float(total)))

    def finish(self) -> None:
        self._show(100.0)

    def _show(self, percent: float) -> None:
        if self._artifact is None:
            self._artifact = create_progress_artifact(progress=percent, description=f"Progress of {self._name}")
        else:
            update_progress_artifact(artifact_id=self._artifact, progress=percent)


def _show_result(run: Run, result: StageResult) -> None:
    """What a stage reached and cost, as a table in the UI."""
    artifact = run.store.attempt(result.key, result.attempt)
    rows = [*_rows("", artifact.metrics), *_rows("cost.", artifact.cost)]
    lines = [f"# {result.stage} of {run.name}", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows)]
    lines += ["", f"key `{artifact.key}`, attempt {artifact.attempt}, content `{artifact.digest[:16]}`"]
    create_markdown_artifact(markdown="\n".join(lines), description=f"{result.stage}: metrics and cost")


def _show_failure(run: Run, name: str, error: NanodagError) -> None:
    """Why a stage failed, what to do, and where its files lie, as an artifact beside the failed task."""
    reason, _, rest = str(error).partition("\n")
    head, _, log_lines = rest.partition("\nLast lines of ")
    advice = [line for line in head.splitlines() if not line.startswith("Folder: ")]
    lines = [f"# {name} of {run.name} failed", "", reason, "", *advice, ""]
    if workspace := run.entry(name).get("workspace"):
        lines += [f"Its folder: [{workspace}]({Path(workspace).as_uri()})", ""]
    if log_lines:
        lines += ["```", f"Last lines of {log_lines}", "```"]
    create_markdown_artifact(markdown="\n".join(lines), description=reason[:200])


def _rows(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    shown = [(k, f"{v:.6g}" if isinstance(v, float) else str(v)) for k, v in values.items()]
    return [(prefix + k, v.replace("|", "\\|").replace("\n", " ")[:300]) for k, v in shown]
