"""Stages as Prefect tasks: one task for each kind, which runs a stage and lets Prefect see it.

The store decides what is done, so Prefect caches nothing: a finished stage's task returns in milliseconds, shown as
Cached. A worker that a signal ended, or that lost its sampler or the network, is started again after a while and goes
on from its checkpoint.
"""

import atexit
import functools
import inspect
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import jinja2
from prefect import Flow, flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import TaskRun
from prefect.futures import PrefectFuture, as_completed
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import Task

from nanodag.children.tree import end_with_parent
from nanodag.config.kind import PAGE, SCORES
from nanodag.config.kinds import find_kind, recorded_kind, shipped
from nanodag.errors import NanodagError, StageInterrupted, StageStopped
from nanodag.errors.words import counted
from nanodag.report import words
from nanodag.run.build_stage import build_stage
from nanodag.run.record import Run, StageResult, open_run, recorded_inputs, recorded_run, served_store
from nanodag.run.stale_stages import advice, stale_stages
from nanodag.worker import logs
from nanodag.worker.launch import Watch
from nanodag.worker.respawn import SERVING
from tasks.notify import tell
from tasks.pool import build_in_pool

shipped()  # their modules are parsed before there are threads: CPython 3.11 fails at times where two parse at once
PROGRESS_EVERY_S = 2.0
RETRY_AFTER_S = [2.0, 30.0]
_PASSING = StageInterrupted | ConnectionError | TimeoutError
SHOWN = suppress(httpx.HTTPError)
"""Around what is shown in Prefect's UI alone: a server that answers with an error, or not at all, ends no stage."""


def may_pass(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """True for a failure that starting again may mend: a signal, sampler or network; never config, NaN or data."""
    return isinstance(state.result(raise_on_failure=False), _PASSING)


def flow_of_stages(*, flow_run_name: str | Callable[[], str], is_told: bool = True) -> Callable[..., Any]:
    """Make a flow of a function, by its name, whose stages run side by side. It ends as Failed with an error's reason
    alone, where Prefect would put words and a class before it. is_told: that it failed is told to `notify.webhook`."""

    def made(body: Callable[..., State[Any]]) -> Flow[..., State[Any]]:
        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> State[Any]:
            try:
                return body(*args, **kwargs)
            except NanodagError as error:
                return Failed(message=str(error), data=error)

        hooks = {"on_failure": [tell], "on_crashed": [tell]} if is_told else {}
        runner = ThreadPoolTaskRunner(max_workers=64)
        return flow(run, name=body.__name__, flow_run_name=flow_run_name, task_runner=runner, **hooks)

    return made


def submit(
    run: Run, stage: str, inputs: Mapping[str, StageResult], *, force: bool = False
) -> PrefectFuture[StageResult]:
    """Start a stage as a task of its kind, beside the flow."""
    return task_of(run.pipeline.stages[stage].kind).submit(stage, run, inputs, force=force)


def start(
    run: Run, stage: str, futures: dict[str, PrefectFuture[StageResult]], *, force: bool = False
) -> PrefectFuture[StageResult] | None:
    """Submit a stage once its inputs are there, which are waited for; None where one that it needs did not come about.
    futures: of the stages submitted so far; added to."""
    inputs = inputs_of(run, stage, futures)
    if inputs is None:
        return None
    futures[stage] = submit(run, stage, inputs, force=force)
    return futures[stage]


def start_all(
    run: Run, futures: dict[str, PrefectFuture[StageResult]], *, force: bool = False, at_once: int | None = None
) -> None:
    """Submit the run's stages, each once all that it takes has ended: branches that need nothing of each other go side
    by side, as far as the devices reach. futures: added to. at_once: the most stages that train at a time."""

    def trains(stage: str) -> bool:
        return not find_kind(run.pipeline.stages[stage].kind).is_beside

    waiting, under_way = list(run.to_do), dict(futures)  # the API may say long after a stage's end that it is running
    while waiting:
        to_come = {*waiting, *under_way}
        ready = [stage for stage in waiting if to_come.isdisjoint(run.pipeline.stages[stage].inputs.values())]
        if at_once is not None:
            room = max(0, at_once - sum(map(trains, under_way)))
            ready = [*(stage for stage in ready if not trains(stage)), *[*filter(trains, ready)][:room]]
        for stage in ready:
            waiting.remove(stage)
            if future := start(run, stage, futures, force=force):
                under_way[stage] = future
        if not ready:
            ended = next(as_completed([*under_way.values()]))
            under_way = {stage: future for stage, future in under_way.items() if future is not ended}


@functools.cache
def task_of(kind: str) -> Task[..., Any]:
    """The task of a kind, also of a user's own. It has the kind's name, and its runs have those of their stages."""
    definition = find_kind(kind)

    @task(
        name=definition.name,
        description=inspect.getdoc(definition.config),
        task_run_name="{name}",
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=len(RETRY_AFTER_S),
        retry_delay_seconds=RETRY_AFTER_S,
        retry_condition_fn=may_pass,
    )
    def stage(name: str, run: Run, inputs: dict[str, StageResult], force: bool = False) -> State[StageResult]:
        progress = _Progress(name)
        is_sent = run.pipeline.stages[name].resources.work_pool != "none" and not run.is_joined
        send = functools.partial(build_in_pool, name, run, inputs, force=force) if is_sent else None

        def hear(metrics: dict[str, Any]) -> None:
            progress(metrics)
            run.on_metrics(name, metrics)

        watch = Watch(on_line=_shown_in(get_run_logger()), on_metrics=hear)
        try:
            result = build_stage(
                run, name, inputs, force=force, watch=watch, send=send, max_restarts=len(RETRY_AFTER_S)
            )
        except StageStopped as error:
            return Cancelled(message=str(error))
        except NanodagError as error:
            _show_failure(run, name, error)
            if isinstance(error, _PASSING) and run.restarts[name] <= len(RETRY_AFTER_S):
                raise  # Prefect starts it again
            return Failed(message=str(error), data=error)
        if definition.makes == PAGE:
            text = (run.store.materialize(run.store.attempt(result.key, result.attempt)) / "report.md").read_text()
            with SHOWN:
                create_markdown_artifact(key=_artifact_key("report", run), markdown=text)
        if result.was_found:
            return Completed(name="Cached", message=f"found in the store: {result.key[:12]}", data=result)
        progress.finish()
        _show_result(run, result)
        return Completed(message=f"published {result.key[:12]}, attempt {result.attempt}", data=result)

    return stage


def own_flow_run() -> str:
    """Prefect's id of the flow run that this process runs; empty without one. Every flow asks for it before it
    begins anything: one that is served ends, from then on, with the process that serves."""
    if deployment.id:  # in a process of its own, started by the one that serves
        # Nobody could cancel it any more. SIGTERM: it says in the run's record that it ended.
        end_with_parent(int(os.environ.get(SERVING, os.getppid())), signal.SIGTERM)
    return str(flow_run.id or "")


def begin_again(
    name: str, *, stage: str = "", begin_at: str = "", stale: bool = False, overrides: Sequence[str] = ()
) -> Run:
    """A run that there is already, for one stage of it, for one and all that follow it, or for what is stale."""
    stages, recorded = recorded_run(
        served_store(), name, stage=stage, begin_at=begin_at, stale=stale, overrides=overrides
    )
    arguments = {"file": recorded.file, "preset": recorded.preset, "overrides": recorded.overrides}
    return open_run(name, **arguments, only=stages, flow_run=own_flow_run())


@contextmanager
def ending(run: Run) -> Iterator[None]:
    """Leave no worker behind and a true record, however the flow ends."""
    if deployment.id:
        atexit.register(settle, run.flow_run, run)
    try:
        yield
    finally:
        run.stop.set()  # tells workers that are still there, after a cancel, to leave a checkpoint and end
        run.close()


def settle(flow_run_id: str, run: Run) -> None:
    """Give an end to a flow run that somebody cancelled when all was done. Prefect lets one that is Cancelling become
    nothing but Cancelled, and who could say so no longer looks at a process that has ended."""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(flow_run_id)).state
        if state is None or not state.is_cancelling():
            return
        is_done = run.store.read_run(run.name).state == "completed"
        end = Completed(message="Completed before Cancel came.") if is_done else Cancelled(message=state.message)
        client.set_flow_run_state(UUID(flow_run_id), end, force=True)


def inputs_of(run: Run, stage: str, futures: Mapping[str, PrefectFuture[StageResult]]) -> dict[str, StageResult] | None:
    """Inputs of a stage, waited for; None when one of its inputs did not come about, and the stage needs it.

    Inputs from stages that are not run this time are those of the run's record.
    """
    sources = run.pipeline.stages[stage].inputs
    results = recorded_inputs(run, stage, [label for label, source in sources.items() if source not in run.to_do])
    for label, source in sources.items():
        if source in futures:
            futures[source].wait()
            if futures[source].state.is_completed():
                results[label] = futures[source].result()
    missing = [source for label, source in sources.items() if label not in results]
    if missing and not (results and find_kind(run.pipeline.stages[stage].kind).takes_what_exists):
        run.note(stage, state="not run", reason=f"needs {', '.join(missing)}")
        return None
    return results


def outcome(stages: Sequence[str], futures: Mapping[str, PrefectFuture[StageResult]]) -> State[Any]:
    """End of a flow, once all its stages have ended: Failed with the reason of each stage that did, or Completed."""
    reasons = []
    for stage, future in futures.items():
        future.wait()
        if not future.state.is_completed():
            reason = str(future.state.result(raise_on_failure=False) or future.state.name)
            reasons.append(reason if reason.startswith(f"Stage {stage} ") else f"{stage}: {reason}")
    not_run = [stage for stage in stages if stage not in futures]
    if not_run:
        reasons.append(f"Not run, for want of their inputs: {', '.join(not_run)}.")
    if reasons:
        return Failed(message="\n".join(reasons))
    num_found = sum(future.result().was_found for future in futures.values())
    return Completed(message=f"{counted(len(futures), 'stage')}, {num_found} of them found in the store")


def concluded(run: Run, state: State[Any]) -> State[Any]:
    """End of a flow, with what is stale now in its message; an artifact has scores, changes, warnings and stages."""
    # They compare and render: a flow's start need not wait for what that takes.
    from nanodag.report.page import build_report, to_markdown
    from nanodag.report.summary import run_context

    record = run.store.read_run(run.name)
    try:
        report = build_report(run.name, run_context(run.store, record))
        for text in report.warnings:
            get_run_logger().warning("%s", text)
        create_markdown_artifact(
            key=_artifact_key("run", run),
            markdown=to_markdown(report),
            description=f"Scores and stages of {run.name}",
        )
    except (NanodagError, OSError, ValueError, httpx.HTTPError, jinja2.TemplateError) as error:  # what is built stays
        get_run_logger().warning("No report of run %s: %s", run.name, error)
    if stale := stale_stages(record):
        state.message = f"{state.message}\nStale now: {', '.join(stale)}; build again with: {advice(run.name)}"
    return state


def _artifact_key(what: str, run: Run) -> str:
    """Key of an artifact in Prefect, which takes lower case, digits and dashes."""
    return f"{what}-{run.name}".lower().replace("_", "-").replace(".", "-")


def _shown_in(logger: Any) -> Callable[[str], None]:
    """Log a worker's lines as far as they are for people."""
    is_for_people = logs.ForPeople()

    def on_line(line: str) -> None:
        if not is_for_people(line):
            return
        if match := logs.LINE.fullmatch(line):  # Prefect writes time and level itself
            logger.log(logging.getLevelNamesMapping()[match["level"]], match["text"])
        else:
            logger.info(line)

    return on_line


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
        with SHOWN:
            if self._artifact is None:
                self._artifact = create_progress_artifact(progress=percent, description=f"Progress of {self._name}")
            else:
                update_progress_artifact(artifact_id=self._artifact, progress=percent)


def _show_result(run: Run, result: StageResult) -> None:
    """Show what a stage reached and cost, as a table in the UI."""
    artifact = run.store.attempt(result.key, result.attempt)
    is_scores = recorded_kind(artifact.kind).makes == SCORES
    lines = [f"# {result.stage} of {run.name}", "", *metrics_table("reached", artifact.metrics, is_scores=is_scores)]
    lines += ["", *metrics_table("cost", artifact.cost)]
    lines += ["", f"key `{artifact.key}`, attempt {artifact.attempt}, content `{artifact.digest[:16]}`"]
    with SHOWN:
        create_markdown_artifact(markdown="\n".join(lines), description=f"{result.stage}: metrics and cost")


def _show_failure(run: Run, name: str, error: NanodagError) -> None:
    """Show why a stage failed, what to do, and where its files lie, as an artifact beside the failed task."""
    reason, _, rest = str(error).partition("\n")
    head, _, log_lines = rest.partition("\nLast lines of ")
    what_to_do = [line for line in head.splitlines() if not line.startswith("Folder: ")]
    paragraphs = [words.markdown(line) for line in (reason, *what_to_do)]
    lines = [f"# {name} of {run.name} failed", "", paragraphs[0], "", *paragraphs[1:], ""]
    if workspace := run.entry(name).workspace:
        lines += [f"Its folder: [{workspace}]({Path(workspace).as_uri()})", ""]
    if log_lines:
        lines.append(words.fenced(f"Last lines of {log_lines}"))
    with SHOWN:
        create_markdown_artifact(markdown="\n".join(lines), description=reason[:200])


def metrics_table(title: str, values: Mapping[str, Any], *, is_scores: bool = False) -> list[str]:
    """A Markdown table of names, values and units. is_scores: they are scores by benchmark."""
    flat = {
        f"{name} {inner}".strip(): number
        for name, value in values.items()
        for inner, number in (value if isinstance(value, dict) else {"": value}).items()
    }
    rows = [f"| {title} | value | unit |", "|---|---:|---|"]
    for name, number in flat.items():
        is_score = is_scores and words.is_share(name)
        value, unit = words.measured(name.partition(" ")[0], number, unit="%" if is_score else "")
        label = name.removesuffix("_ms").removesuffix("_s").replace("_", " ")
        cells = [words.markdown(text[:300]) for text in (label, value, unit)]
        rows.append(f"| {' | '.join(cells)} |")
    return rows
