"""Builds one stage: compute its key, look it up, else launch its worker and publish what it made."""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from nanodag import registry as entries
from nanodag.config import AnyStage, Pipeline, result_config
from nanodag.config.kinds.rl import RLStage
from nanodag.config.trust import functions_in, sources_in
from nanodag.data.digests import file_sha256
from nanodag.data.sources import open_source
from nanodag.errors import ConfigError, StageFailed, StageStopped, StoreBusy
from nanodag.model.import_model import model_identity
from nanodag.own_code.find import file_of
from nanodag.run.kinds import KINDS
from nanodag.run.record import Run, StageResult, result_of
from nanodag.run.report_context import context_stages
from nanodag.run.stale import config_digest, stale_stages
from nanodag.store import Artifact, stage_key
from nanodag.store.provenance import environment
from nanodag.worker.devices import STEP_BACK_S, devices_folder, devices_for, hold, named_gpus, num_gpus_of
from nanodag.worker.job import Job
from nanodag.worker.launch import LOG_NAME, Result, begin_try, run_worker, usage_of

log = logging.getLogger(__name__)

WAIT_FOR_DEVICE_S = 24 * 3600.0
SERVER_TIMEOUT_S = 20.0  # of a teacher's server, to say what it serves

Inputs = Mapping[str, StageResult]


def build_stage(
    run: Run,
    name: str,
    inputs: Inputs,
    *,
    force: bool = False,
    on_line: Callable[[str], None] = lambda line: None,
    on_metrics: Callable[[dict[str, Any]], None] = lambda metrics: None,
    send: Callable[[], None] | None = None,
    max_restarts: int = 0,
) -> StageResult:
    """The result of one stage of a run: found in the store, or built.

    inputs: input name -> result of that stage. force: build another attempt even where one is found. on_line and
    on_metrics: as in nanodag.worker.launch.run_worker. send: has the stage built elsewhere, in the same store, and
    returns when it is. max_restarts: how often the caller calls this again, after a StageInterrupted.

    Raises StageFailed, or another NanodagError, after the run's record says so too.
    """
    began, waited_s = time.monotonic(), 0.0
    stage = run.pipeline.stages[name]
    restarts = run.restarts[name]
    run.restarts[name] += 1
    run.note(name, started=time.time(), ended=0.0, earlier_s=0.0, reason="")
    try:
        key, sources = key_of(run, stage, inputs)
        run.note_key(name, key)  # before it is looked up: from now on `gc` keeps what there is of it
        # A flow run that is retried does not force again what it has forced already.
        mark = [run.flow_run, key]
        force = force and not (run.flow_run and run.entry(name)["forced"] == mark)
        artifact = None if force else run.store.lookup(key)
        was_found = artifact is not None
        if artifact is None and send is not None:
            send()
            if (artifact := run.store.lookup(key)) is None:
                raise StageFailed(
                    f"Stage {name} was built elsewhere, and the store {run.store.url} does not have it under the key "
                    f"{key[:12]}: whoever builds it must use the same store, data and code."
                )
        elif artifact is None:
            # As long as another builder may take: to get a device, and then for the stage itself.
            wait_s = WAIT_FOR_DEVICE_S + stage.timeout_s
            with run.store.building(key, timeout_s=wait_s, give_up=run.stop.is_set) as lock:
                # Another process may have published it while this one waited.
                artifact = None if force else run.store.lookup(key)
                if artifact is None:
                    build = _Build(run, name, inputs, key, sources, lock)
                    artifact = build(on_line, on_metrics, restarts, max(0, max_restarts - restarts))
                    waited_s = build.waited_s
                run.store.discard_workspace(key)
    except BaseException as error:
        state = "stopped" if run.stop.is_set() else "failed"
        run.note(name, state=state, ended=time.time(), reason=str(error) or type(error).__name__)
        if isinstance(error, StoreBusy) and run.stop.is_set():
            raise StageStopped(
                f"Stage {name} was stopped while it waited for another run that builds the same."
            ) from error
        raise
    run.note(
        name,
        state="found" if was_found else "built",
        ended=time.time(),
        key=key,
        attempt=artifact.attempt,
        digest=artifact.digest,
        made_of={label: result.digest for label, result in inputs.items()},
        made_with=config_digest(stage),
        bytes=artifact.num_bytes,
        cost=artifact.cost,
        took_s=round(time.monotonic() - began - waited_s, 3),
        **({"forced": mark} if force else {}),
    )
    return result_of(name, artifact, was_found=was_found)


def key_of(run: Run, stage: AnyStage, inputs: Inputs) -> tuple[str, dict[str, Any]]:
    """A stage's key, and the identities of the data it reads by URL.

    In the key an identity stands in the place of its URL, so that moving a file changes nothing.
    """
    mirror = None if run.pipeline.mirror == "none" else Path(run.pipeline.mirror)
    sources: dict[str, Any] = {}
    for source in sources_in(stage):
        if source.url not in sources:
            sources[source.url] = open_source(source.url, mirror).identity()
        if ":" in source.adapter:
            sources[source.adapter] = code_identity(source.adapter)
    if isinstance(stage, RLStage):
        sources |= {name: code_identity(name) for name in functions_in(stage)}
        folders = [model for model in (stage.teacher.model, stage.critic.model) if model.startswith("/")]
        sources |= {folder: model_identity(f"file:{folder}") for folder in folders}
        if (url := stage.teacher.url) != "none":
            sources[url] = server_identity(url)
    if stage.kind == "import":
        sources[stage.model] = model_identity(stage.model, mirror)
    key = stage_key(
        kind=stage.kind,
        code_version=KINDS[stage.kind].code_version,
        config=with_identities(result_config(stage), sources),
        inputs={label: result.digest for label, result in inputs.items()},
        sources={},
    )
    return key, sources


def code_identity(function: str) -> dict[str, Any]:
    """What names a user's `module:function` in a key: its name and the sha256 of its module's file.

    Raises ConfigError when there is no such module.
    """
    module = entries.without_prefix(function).partition(":")[0]
    file = file_of(module)
    if file is None:
        raise ConfigError(f"{function!r}: there is no module {module} beside the pipeline file or on Python's path.")
    return {"kind": "code", "name": function, "sha256": file_sha256(file)}


def server_identity(url: str) -> dict[str, Any]:
    """What names a teacher's server in a key: its URL, and the model that it says it serves, with its version.

    Raises ConfigError when it does not answer.
    """
    try:
        answer = httpx.get(f"{url.rstrip('/')}/model_info", timeout=SERVER_TIMEOUT_S, trust_env=False)
        answer.raise_for_status()
        found = answer.json()
        return {"kind": "server", "url": url, "model": found["model_path"], "version": str(found["weight_version"])}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"teacher.url {url} does not say which model it serves: {type(error).__name__} {error}. Start the server "
            "first: the stage's key knows its model."
        ) from error


def with_identities(value: Any, sources: Mapping[str, Any]) -> Any:
    """A config with the identity of each source in the place of its name; beside the value, where the name is a key."""
    if isinstance(value, dict):
        named = {k: with_identities(v, sources) for k, v in value.items()}
        return {k: [sources[k], v] if k in sources else v for k, v in named.items()}
    if isinstance(value, list):
        return [with_identities(v, sources) for v in value]
    return sources.get(value, value) if isinstance(value, str) else value


def cluster_context(pipeline: Pipeline, stage: AnyStage) -> dict[str, Any]:
    """What a worker is told of other machines: nothing, for a stage on this one alone."""
    return {"cluster": pipeline.cluster.model_dump(mode="json")} if stage.resources.nodes > 1 else {}


class _Build:
    """One stage that the store does not have."""

    def __init__(self, run: Run, name: str, inputs: Inputs, key: str, sources: dict[str, Any], lock: int) -> None:
        self._run, self._name, self._inputs = run, name, inputs
        self._key, self._sources, self._lock, self._began = key, sources, lock, time.monotonic()
        self.waited_s = 0.0  # for a device of the machine
        self._stage = run.pipeline.stages[name]

    def __call__(
        self,
        on_line: Callable[[str], None],
        on_metrics: Callable[[dict[str, Any]], None],
        restarts: int,
        restarts_left: int,
    ) -> Artifact:
        run, stage, kind = self._run, self._stage, KINDS[self._stage.kind]
        job = self._job()
        device, num_ranks = str(stage.resources.device), int(stage.resources.num_ranks)
        devices = devices_for(device=device, num_gpus=num_gpus_of(stage), is_beside=kind.is_beside, at_once=run.at_once)
        step_back_s = STEP_BACK_S if kind.is_beside and device == "cuda" else 0.0
        asked = time.monotonic()
        # After the key's lock, never before it: who holds devices waits for nobody, so no two wait for each other.
        with hold(devices_folder(run.store), devices, stop=run.stop, step_back_s=step_back_s) as held:
            self.waited_s = time.monotonic() - asked
            tried = {"earlier_s": begin_try(job.workspace), "workspace": str(job.workspace)}
            run.note(self._name, state="running", started=time.time(), key=self._key, **tried)
            log.info("Stage %s: key %s, workspace %s", self._name, self._key[:12], job.workspace)
            with self._mirrored(job):
                result = run_worker(
                    kind.module,
                    job,
                    num_ranks=num_ranks if kind.has_ranks else 1,
                    nodes=stage.resources.nodes if kind.has_ranks else 1,
                    threads=int(stage.resources.threads),
                    device=device,
                    gpus=named_gpus(held.numbers) if device == "cuda" else "",
                    niceness=kind.niceness,
                    hold=(self._lock, *held.descriptors),
                    stop=run.stop,
                    on_line=on_line,
                    on_metrics=on_metrics,
                    timeout_s=stage.timeout_s,
                    restarts=restarts,
                    restarts_left=restarts_left,
                )
        artifact = self._publish(job, result)
        if run.pipeline.store.mirror_checkpoints:
            run.store.mirror(self._key, job.checkpoints).drop()
        return artifact

    @contextlib.contextmanager
    def _mirrored(self, job: Job) -> Iterator[None]:
        """Go on from mirrored checkpoints, and mirror new ones while the worker works, where that is asked for."""
        if not self._run.pipeline.store.mirror_checkpoints:
            yield
            return
        mirror = self._run.store.mirror(self._key, job.checkpoints)
        mirror.restore()
        with mirror:
            yield

    def _job(self) -> Job:
        store = self._run.store
        artifacts = {label: store.attempt(r.key, r.attempt) for label, r in self._inputs.items()}
        run = self._run
        context: dict[str, Any] = {
            "preset": run.pipeline.preset,
            "mirror": run.pipeline.mirror,
            "code": str(run.code_path),
            "composed": run.composed,
            **cluster_context(run.pipeline, self._stage),
        }
        if self._stage.kind == "report":
            context |= _report_context(self._run, self._name, self._inputs)
        return Job(
            name=self._name,
            run=self._run.name,
            config=self._stage,
            inputs={label: store.materialize(artifact) for label, artifact in artifacts.items()},
            workspace=store.workspace(self._key),
            context=context,
        )

    def _publish(self, job: Job, result: Result) -> Artifact:
        usage = usage_of(job.workspace)
        device = str(self._stage.resources.device)
        cost = {
            **result.cost,
            "seconds": usage["seconds"],
            "earlier_seconds": usage["earlier_seconds"],
            "cpu_seconds": usage["cpu_s"],
            "peak_bytes": max(usage["largest_process_bytes"], result.cost.get("peak_bytes", 0)),
            "num_attempts": usage["num_attempts"],
            "device": device,
            "start_s": round(result.start_s, 3),
            "work_s": round(result.work_s, 3),
            "waited_s": round(self.waited_s, 3),
            "orchestration_s": round(
                time.monotonic() - self._began - self.waited_s - result.start_s - result.work_s, 3
            ),
        }
        _collect_records(job)
        return self._run.store.publish(
            self._key,
            job.output,
            records=job.records,
            kind=self._stage.kind,
            stage=self._name,
            config=self._stage.model_dump(mode="json"),
            lineage={
                label: {"stage": r.stage, "kind": r.kind, "key": r.key, "attempt": r.attempt, "digest": r.digest}
                for label, r in self._inputs.items()
            },
            sources=self._sources,
            metrics=result.metrics,
            cost=cost,
            environment=environment(device),
        )


def _collect_records(job: Job) -> None:
    """Put what every worker leaves beside what this one chose to keep."""
    if not job.output.is_dir():
        raise StageFailed(f"Stage {job.name} said that it is done but left no folder {job.output}.")
    job.records.mkdir(exist_ok=True)
    for name in ("metrics.jsonl", "job.json", "result.json", LOG_NAME):
        if (job.workspace / name).exists():
            shutil.copyfile(job.workspace / name, job.records / name)
    if (board := job.workspace / "tensorboard").is_dir():
        shutil.copytree(board, job.records / "tensorboard", dirs_exist_ok=True)


def _report_context(run: Run, name: str, inputs: Inputs) -> dict[str, Any]:
    """What nanodag.report lists, for every stage above that has a result: its manifest, its files, its records."""
    record = run.store.read_run(run.name)
    above = {r.stage for r in inputs.values()}
    for stage in reversed(run.order[: run.order.index(name)]):
        if stage in above:
            above |= set(run.pipeline.stages[stage].inputs.values())
    shown = context_stages(run.store, record, [s for s in run.order if s in above], is_read=lambda artifact: True)
    stale = {stage: why for stage, why in stale_stages(record).items() if stage in above}
    return {"description": run.pipeline.description, "origins": dict(run.origins), "stale": stale, "stages": shown}
