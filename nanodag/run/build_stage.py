"""Builds one stage: compute its key, look it up, else launch its worker and publish what it made."""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from nanodag.config import AnyStage, result_config
from nanodag.config.kind import PAGE
from nanodag.config.kinds import find_kind
from nanodag.config.kinds.evaluation import BenchmarkConfig, EndpointConfig
from nanodag.config.rl_parts import EntryConfig
from nanodag.config.section import found_in
from nanodag.config.stage_base import StageBase
from nanodag.data.config import SourceConfig
from nanodag.data.digests import file_sha256, folder_sha256
from nanodag.data.opening import open_source
from nanodag.errors import ConfigError, StageFailed, StageStopped, StoreBusy
from nanodag.errors.words import listed
from nanodag.evaluation.forms import form_files
from nanodag.host.machine import visible_gpus
from nanodag.model.model_source import model_identity
from nanodag.own_code.find import file_of, required_file
from nanodag.rl.rollouts.saved import saved_files
from nanodag.run.record import Run, StageResult, context_stages, lineage_of, result_of
from nanodag.run.stale_stages import config_digest, stale_stages
from nanodag.store import Artifact, stage_key
from nanodag.store.provenance import environment
from nanodag.store.run_record import Made
from nanodag.worker.devices import LAST_S, STEP_BACK_S, devices_folder, devices_for, hold, named_gpus
from nanodag.worker.job import Job
from nanodag.worker.launch import LOG_NAME, Result, Watch, begin_try, run_worker, usage_of
from nanodag.worker.tracker import FOLDER as TRACKERS
from nanodag.worker.tracker import TrackerProcesses

log = logging.getLogger(__name__)

WAIT_FOR_DEVICE_S = 24 * 3600.0
SERVER_TIMEOUT_S = 20.0  # of somebody else's server, to say what it serves
LISTED = ("root", "owned_by", "max_model_len", "meta", "weight_version")  # of a model, and the same at each call
OF_TOOLS = (".git", ".venv")
"""Folders of a program's folder whose files change though the program does not."""

Inputs = Mapping[str, StageResult]


def build_stage(
    run: Run,
    name: str,
    inputs: Inputs,
    *,
    force: bool = False,
    watch: Watch | None = None,
    send: Callable[[], None] | None = None,
    max_restarts: int = 0,
) -> StageResult:
    """Find the result of one stage of a run in the store, or build it.

    inputs: input name -> result of that stage. force: build another attempt even where one is found. watch: its
    callbacks alone. send: has the stage built elsewhere, in the same store, and returns when it is. max_restarts: how
    often the caller calls this again, after a StageInterrupted.

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
        mark = (run.flow_run, key)
        force = force and not (run.flow_run and run.entry(name).forced == mark)
        artifact = None if force else run.store.lookup(key)
        was_found = artifact is not None
        if artifact is None and send is not None:
            send()
            if (artifact := run.store.lookup(key)) is None:
                raise StageFailed(
                    f"Stage {name} was built elsewhere, and the store {run.store.url} does not have it under the key "
                    f"{key[:12]}: the process that builds it must use the same store, data and code."
                )
        elif artifact is None:
            # As long as another builder may take: to get a device, and then for the stage itself.
            wait_s = WAIT_FOR_DEVICE_S + stage.timeout_s
            with run.store.building(key, timeout_s=wait_s, give_up=run.stop.is_set) as lock:
                # Another process may have published it while this one waited.
                artifact = None if force else run.store.lookup(key)
                if artifact is None:
                    left = max(0, max_restarts - restarts)
                    watch = replace(watch or Watch(), stop=run.stop, restarts=restarts, restarts_left=left)
                    artifact, waited_s = _build(run, name, inputs, key, sources, lock, watch)
                run.store.discard_workspace(key)
    except BaseException as error:
        state = "stopped" if run.stop.is_set() or isinstance(error, StageStopped) else "failed"
        run.note(name, state=state, ended=time.time(), reason=str(error) or type(error).__name__)
        if isinstance(error, StoreBusy) and run.stop.is_set():
            raise StageStopped(
                f"Stage {name} was stopped while it waited for another run that builds the same."
            ) from error
        raise
    made = made_from(artifact, stage, inputs, took_s=time.monotonic() - began - waited_s)
    ended = {"state": "found" if was_found else "built", "ended": time.time(), "key": key, "made": made}
    run.note(name, **ended, **({"forced": mark} if force else {}))
    return result_of(name, artifact, was_found=was_found)


def key_of(run: Run, stage: AnyStage, inputs: Inputs) -> tuple[str, dict[str, Any]]:
    """A stage's key, and the identities of the data it reads by URL.

    In the key an identity stands in the place of its URL, so that moving a file changes nothing.
    """
    mirror = None if run.pipeline.mirror == "none" else Path(run.pipeline.mirror)
    sources: dict[str, Any] = {}
    for _, source in found_in(stage, SourceConfig):
        if source.url not in sources and not source.url.startswith("input:"):  # the input's digest names its rows
            sources[source.url] = open_source(source.url, mirror).identity()
        if ":" in source.adapter:
            sources[source.adapter] = code_identity(source.adapter)
    sources |= own_entries(stage)
    for _, benchmark in found_in(stage, BenchmarkConfig):
        if files := form_files(benchmark):
            sources[benchmark.form] = {"kind": "form", "sha256": [file_sha256(file) for file in files]}
        if benchmark.judge != "none":
            sources[benchmark.judge] = {"kind": "judge", "sha256": file_sha256(Path(benchmark.judge))}
    for _, endpoint in found_in(stage, EndpointConfig):
        if endpoint.model:
            sources[endpoint.url] = server_identity(endpoint.url, endpoint)
    for _, what, name, _ in stage.external_inputs():
        if identity_of := IDENTITIES.get(what):
            sources[name] = identity_of(name, mirror)
    kind = find_kind(stage.kind)
    if ":" in stage.kind:
        # Of a package its `__main__` too, which is what `python -m` runs.
        modules = [kind.module, *filter(file_of, [f"{kind.module}.__main__"])]
        sources[stage.kind] = code_identity(stage.kind) | {"worker": list(map(code_identity, modules))}
    key = stage_key(
        kind=stage.kind,
        code_version=kind.code_version,
        config=with_identities(result_config(stage), sources),
        inputs={label: result.digest for label, result in inputs.items()},
    )
    return key, sources


def own_entries(stage: AnyStage) -> dict[str, Any]:
    """Identity of each function, file and folder of the user's own in a key, by what stands in the config: the entry's
    name, as `process:module:function`, or the folder's path.

    Raises ConfigError for one that is not there."""
    own: dict[str, Any] = {}
    for _, entry in found_in(stage, EntryConfig):
        if entry.own_function:
            own[entry.name] = code_identity(entry.own_function) | {"name": entry.name}
        if path := entry.own("file"):
            if not Path(path).is_file():
                raise ConfigError(f"there is no file {path}")
            own[entry.name] = {"kind": "file", "sha256": file_sha256(Path(path))}
        if entry.name.startswith("model:/"):
            own[entry.name] = IDENTITIES["model"](entry.name.removeprefix("model:"), None)
        if path := entry.agents_path("library"):  # its packages' versions: a program's own code belongs into its folder
            packages = {package.stem for package in _folder(path).glob("lib/python*/site-packages/*.dist-info")}
            # Without any its path, or all such folders would be the same.
            own[path] = {"kind": "library", **({"packages": sorted(packages)} if packages else {"path": path})}
        if path := entry.agents_path("folder"):
            own[path] = {"kind": "folder", "sha256": folder_sha256(_folder(path), without=OF_TOOLS)}
    return own


def _folder(path: str) -> Path:
    if not Path(path).is_dir():
        raise ConfigError(f"there is no folder {path}")
    return Path(path)


def code_identity(function: str) -> dict[str, Any]:
    """Identity of a user's `module:function`, or module, in a key: its name and the sha256 of its module's file.

    Raises ConfigError when there is no such module.
    """
    file = required_file(function.partition(":")[0], function)
    return {"kind": "code", "name": function, "sha256": file_sha256(file)}


def server_identity(url: str, endpoint: EndpointConfig | None = None) -> dict[str, Any]:
    """Identity of a server in a key: its URL, and the model that it says it serves; a teacher's with its version, an
    endpoint's with what the server lists of it.

    Raises ConfigError when it does not answer, or does not serve the endpoint's model.
    """
    if endpoint is None and "#" in url:  # a teacher behind an OpenAI API
        address, _, name = url.partition("#")
        return server_identity(address, EndpointConfig(url=address, model=name))
    path, setting = ("model_info", "teacher.url") if endpoint is None else ("models", "endpoint.url")
    how: dict[str, Any] = {"trust_env": False} if endpoint is None else {"headers": endpoint.headers()}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/{path}", timeout=SERVER_TIMEOUT_S, **how)
        answer.raise_for_status()
        info = answer.json()
        if endpoint is None:
            return {"kind": "server", "url": url, "model": info["model_path"], "version": str(info["weight_version"])}
        models = {str(model["id"]): model for model in info["data"]}
        if (model := models.get(endpoint.model)) is None:
            raise LookupError(f"endpoint.model {endpoint.model!r} is not among {listed(sorted(models)[:20])}")
        return {"kind": "server", "url": url, "model": endpoint.model} | {n: model[n] for n in LISTED if n in model}
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{setting} {url} does not say which model it serves: {type(error).__name__} {error}. Start the server "
            "first: the stage's key knows its model."
        ) from error


IDENTITIES: Mapping[str, Callable[[str, Path | None], dict[str, Any]]] = {
    "model": lambda name, mirror: model_identity(f"file:{name}" if name.startswith("/") else name, mirror),
    "server": lambda name, mirror: server_identity(name),
    "rollouts": lambda name, mirror: saved_files(name).identity(),
}
"""Identity of an external input in a key, by what it is. CORE has none: it changes no weights."""


def with_identities(value: Any, sources: Mapping[str, Any]) -> Any:
    """A config with the identity of each source in the place of its name; beside the value, where the name is a key."""
    if isinstance(value, dict):
        named = {k: with_identities(v, sources) for k, v in value.items()}
        return {k: [sources[k], v] if k in sources else v for k, v in named.items()}
    if isinstance(value, list):
        return [with_identities(v, sources) for v in value]
    return sources.get(value, value) if isinstance(value, str) else value


def made_from(artifact: Artifact, config: AnyStage, inputs: Inputs, *, took_s: float = 0.0) -> Made:
    """Entry of a run's record for a stage that has this result."""
    return Made(
        attempt=artifact.attempt,
        digest=artifact.digest,
        inputs={label: result.digest for label, result in inputs.items()},
        config=config_digest(config),
        num_bytes=artifact.stored_bytes,
        cost=dict(artifact.cost),
        took_s=round(took_s, 3),
    )


def _build(
    run: Run, name: str, inputs: Inputs, key: str, sources: Mapping[str, Any], lock: int, watch: Watch
) -> tuple[Artifact, float]:
    """Build a stage that the store lacks, and publish it; returns with it the seconds that it waited for devices."""
    began, stage = time.monotonic(), run.pipeline.stages[name]
    job = job_of(run, name, stage, inputs, run.store.workspace(key))
    if find_kind(stage.kind).makes == PAGE:
        job = replace(job, context={**job.context, **report_context(run, name, inputs)})

    def say(waits: str) -> None:
        log.info("Stage %s %s", name, waits)
        run.note(name, reason=f"{waits}. It begins when they are free; a run that is stopped frees them, and resumes.")

    result, waited_s = work(run, job, lock, watch, on_devices=_on_devices(run, name, key, job), say=say)
    device = str(stage.resources.device)
    cost = {
        **result.cost,
        **usage_of(job.workspace),
        "device": device,
        "start_s": round(result.start_s, 3),
        "work_s": round(result.work_s, 3),
        "waited_s": round(waited_s, 3),
        "orchestration_s": round(time.monotonic() - began - waited_s - result.start_s - result.work_s, 3),
    }
    job.records.mkdir(exist_ok=True)  # what every worker leaves, beside what this one chose to keep
    for file in ("metrics.jsonl", "job.json", "result.json", LOG_NAME):
        if (job.workspace / file).exists():
            shutil.copyfile(job.workspace / file, job.records / file)
    for folder in ("tensorboard", TRACKERS):
        if (job.workspace / folder).is_dir():
            shutil.copytree(job.workspace / folder, job.records / folder, dirs_exist_ok=True)
    artifact = run.store.publish(
        key,
        job.output,
        records=job.records,
        kind=stage.kind,
        stage=name,
        config=stage.model_dump(mode="json"),
        lineage=lineage_of(inputs),
        sources=sources,
        metrics=result.metrics,
        cost=cost,
        environment=environment(device),
    )
    if run.pipeline.store.mirror_checkpoints:
        run.store.mirror(key, job.checkpoints).drop()
    trackers = run.pipeline.tracking.trackers
    TrackerProcesses(job.workspace, trackers, run.store.address(artifact), artifact.digest).close()
    return artifact, waited_s


@contextlib.contextmanager
def _on_devices(run: Run, name: str, key: str, job: Job) -> Iterator[None]:
    """Say that the stage is running. Go on from mirrored checkpoints, and mirror new ones while the worker works, where
    that is asked for."""
    tried = {"earlier_s": begin_try(job.workspace), "workspace": str(job.workspace)}
    run.note(name, state="running", reason="", started=time.time(), key=key, **tried)
    log.info("Stage %s: key %s, workspace %s", name, key[:12], job.workspace)
    if not run.pipeline.store.mirror_checkpoints:
        yield
        return
    mirror = run.store.mirror(key, job.checkpoints)
    mirror.restore()
    with mirror:
        yield


def job_of(run: Run, name: str, config: AnyStage, inputs: Mapping[str, StageResult], workspace: Path) -> Job:
    """Job of a stage's worker. The files of its inputs are brought here, and verified, first."""
    store = run.store
    return Job(
        name=name,
        run=run.name,
        config=config,
        inputs={label: store.materialize(store.attempt(r.key, r.attempt)) for label, r in inputs.items()},
        workspace=workspace,
        context={
            "preset": run.pipeline.preset,
            "mirror": run.pipeline.mirror,
            "store": str(store.local),
            "code": str(run.code_path),
            "trusted_modules": list(run.pipeline.trusted_modules),
            "composed": run.composed,
            "bases": {label: {"key": r.key, "digest": r.digest} for label, r in inputs.items()},
            "tracking": run.pipeline.tracking.model_dump(mode="json"),
            "trackers_folder": str(store.local / "trackers"),
            **({"cluster": run.pipeline.cluster.model_dump(mode="json")} if config.machines else {}),
        },
    )


def work(
    run: Run,
    job: Job,
    lock: int,
    watch: Watch,
    *,
    on_devices: AbstractContextManager[Any] | None = None,
    steps_back: bool = False,
    say: Callable[[str], None] = log.info,
) -> tuple[Result, float]:
    """Wait for devices of this machine, and run the job there; returns with its result the seconds that it waited.

    lock: the descriptor of the key's lock, which the worker holds as long as it lives; it comes before the devices: who
    holds devices waits for nobody, so no two wait for each other. on_devices: entered once they are held, left when the
    worker has ended. steps_back: GPUs that another stage waits for are left to it. say: hears what it waits for.
    nanodag.worker.launch.run_worker says what is raised.
    """
    stage, resources = job.config, job.config.resources
    device, ranks = str(resources.device), int(resources.num_ranks) // resources.num_nodes
    devices = devices_for(
        device=device,
        num_gpus=stage.num_gpus(len(visible_gpus())),
        spare_gpus=stage.spare_gpus,
        is_beside=find_kind(stage.kind).is_beside,
        cores=ranks * int(resources.threads),
        at_once=run.at_once,
    )
    step_back_s = 0.0
    if device == "cuda":
        step_back_s = LAST_S if steps_back else steps_back_s(run, stage)
    wait_start = time.monotonic()
    who: dict[str, Any] = {"holder": f"{job.name} of run {run.name}", "say": say}
    with hold(devices_folder(run.store), devices, stop=run.stop, step_back_s=step_back_s, **who) as held:
        waited_s = time.monotonic() - wait_start
        with on_devices or contextlib.nullcontext():
            gpus = named_gpus(held) if device == "cuda" else ""
            result = run_worker(job, gpus=gpus, hold=(lock, *held.values()), watch=watch)
    if not job.output.is_dir():
        raise StageFailed(f"Stage {job.name} said that it is done but left no folder {job.output}.")
    return result, waited_s


def steps_back_s(run: Run, stage: StageBase) -> float:
    """Seconds for which GPUs must have been free before a stage takes them: one that trains a model on leaves them to
    the run's evaluation of that model, which takes as long now as at the end; any other evaluation to whatever trains.
    """
    of_run = [run.pipeline.stages[name] for name in run.to_do]
    same = [other for other in of_run if "model" in stage.inputs and other.inputs.get("model") == stage.inputs["model"]]
    kinds = [find_kind(other.kind) for other in same if other.resources.device == "cuda"]
    if find_kind(stage.kind).is_beside:
        return 0.0 if any(kind.trains for kind in kinds) else LAST_S
    return STEP_BACK_S if find_kind(stage.kind).trains and any(kind.is_beside for kind in kinds) else 0.0


def report_context(run: Run, name: str, inputs: Inputs) -> dict[str, Any]:
    """Context of a report's job (nanodag.report), of each stage above with a result: manifest, files, records."""
    record = run.store.read_run(run.name)
    above = {r.stage for r in inputs.values()}
    for stage in reversed(run.order[: run.order.index(name)]):
        if stage in above:
            above |= set(run.pipeline.stages[stage].inputs.values())
    shown = context_stages(run.store, record, [s for s in run.order if s in above], is_read=lambda artifact: True)
    stale = {stage: why for stage, why in stale_stages(record).items() if stage in above}
    return {"description": run.pipeline.description, "origins": dict(run.origins), "stale": stale, "stages": shown}
