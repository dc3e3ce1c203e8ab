"""One run of a pipeline: its resolved config, its store, and the record of what became of each stage."""

import json
import logging
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from nanodag.config import AnyStage, Pipeline, Resolved, order_of, resolve
from nanodag.config.kinds import find_kind, vouch_for
from nanodag.config.trust import check_trust
from nanodag.errors import ArtifactNotFound, ConfigError, StoreBusy
from nanodag.errors.words import counted, nearest
from nanodag.host.folders import pipeline_file
from nanodag.host.machine import detect, machine_of
from nanodag.own_code.find import search_last
from nanodag.own_code.trusted_modules import check_owner
from nanodag.run.python_path import take_python_path
from nanodag.run.stale_stages import config_digest, following, left_alone, stale_stages
from nanodag.store import Artifact, Store
from nanodag.store.provenance import code_revision, process_started
from nanodag.store.run_record import ENDED_WELL, RunRecord, StageRecord, references_in

log = logging.getLogger(__name__)

MOST_RECORDS = 64_000_000  # bytes that a page brings from a remote store for a stage's curves and samples
_OF_ARTIFACT = ("kind", "key", "attempt", "digest")
_REPORTED = (*_OF_ARTIFACT, "metrics", "cost", "config", "sources", "environment", "created")


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """Result that a stage hands to those after it. was_found: the store had it already; digest: its content's."""

    stage: str
    kind: str
    key: str
    attempt: str
    digest: str
    was_found: bool


class Run:
    """A run under way. Not a dataclass, so that what carries it about does not look inside."""

    def __init__(self, name: str, resolved: Resolved, store: Store, code_path: Path, flow_run: str = "") -> None:
        self.name = name
        self.flow_run = flow_run  # Prefect's id
        self.code_path = code_path  # the pipeline file's folder: a user's own modules lie beside it
        search_last(code_path)
        self.pipeline: Pipeline = resolved.pipeline
        self.origins: Mapping[str, str] = resolved.origins
        self.machine = resolved.machine
        self.store = store
        self.stop = threading.Event()
        self.to_do = self.order
        self.is_joined = False  # another process opened it and closes it; this one runs a stage of it
        self.composed = ""  # `sweep` or `nightly` for a run that nanodag.run.derived_runs opened
        self.restarts: Counter[str] = Counter()  # by stage: how often it was begun in this process
        self.at_once = 1  # stages that train side by side where there is no GPU
        # Hears each record of a stage's metrics; an error that it raises ends the stage.
        self.on_metrics: Callable[[str, Mapping[str, Any]], None] = lambda stage, metrics: None

    @property
    def order(self) -> list[str]:
        """Stage names, inputs first. to_do: those of them that are run this time."""
        return order_of(self.pipeline)

    def note(self, stage: str, **fields: Any) -> None:
        self.store.change_run(self.name, lambda record: record.with_stage(stage, **fields))

    def note_key(self, stage: str, key: str) -> None:
        """Record the key that a stage is going to have; what it has of another key is no more its result."""

        def change(record: RunRecord) -> RunRecord:
            entry = record.stages[stage]
            return record.with_stage(stage, key=key, made=entry.made if entry.key == key else None)

        self.store.change_run(self.name, change)

    def entry(self, stage: str) -> StageRecord:
        return self.store.read_run(self.name).stages[stage]

    def close(self) -> None:
        """Record that nothing of this run is under way any more, and how it ended: `completed`, `failed`, `stopped`, or
        `unfinished`, where this time's stages are done and others have not been run."""
        self.store.change_run(self.name, lambda record: _ended(record, self.to_do))


def _ended(record: RunRecord, to_do: Sequence[str]) -> RunRecord:
    stages = {name: _stage_ended(entry) for name, entry in record.stages.items()}
    states = {entry.state for entry in stages.values()}
    state = "failed" if "failed" in states else "completed" if states <= set(ENDED_WELL) else "stopped"
    if state == "stopped" and all(stages[name].has_ended_well for name in to_do):
        state = "unfinished"
    reasons = [f"{name}: {entry.reason}" for name, entry in stages.items() if entry.state == "failed"]
    before = () if state == "completed" else record.before
    return record.changed(stages=stages, state=state, reason="\n".join(reasons), ended=time.time(), before=before)


def _stage_ended(entry: StageRecord) -> StageRecord:
    if entry.state == "waiting":  # what it may have is of an earlier run of this name
        return entry.changed(state="not run" if entry.made is None else "found")
    return entry.changed(state="stopped", ended=time.time()) if entry.state == "running" else entry


def begin(run: Run, stages: Mapping[str, StageRecord], before: RunRecord | None, **about: Any) -> Run:
    """Write the record of a run that this process begins, or resumes. about: the fields that kinds of runs differ in.

    before: the record that it replaces. What that keeps alive the store keeps until this run has completed.
    """
    dumped = run.pipeline.model_dump(mode="json")
    record = RunRecord(
        run=run.name,
        created=before.created if before is not None else time.time(),
        started=time.time(),
        state="running",
        preset=run.pipeline.preset,
        pipeline=dumped,
        origins=dict(run.origins),
        machine=str(run.machine),
        stages=dict(stages),
        before=tuple(dict.fromkeys(before.references())) if before is not None else (),
        uses=tuple(dict.fromkeys(references_in(dumped))),
        revision=code_revision(),
        flow_run=run.flow_run,
        pid=os.getpid(),
        pid_started=process_started(psutil.Process()),
        host=socket.gethostname(),
        **about,
    )
    run.store.write_run(record)
    run.composed = record.composed
    return run


def refuse_busy(what: str, record: RunRecord | None) -> None:
    """Raise StoreBusy when another process that is alive executes a run. what: `Run`, `Sweep` or `Night`."""
    if record is not None and record.is_alive and record.pid != os.getpid():
        raise StoreBusy(f"{what} {record.run} is under way in process {record.pid}; wait for it, or stop it.")


def waiting_stage(config: AnyStage, earlier: StageRecord | None) -> StageRecord:
    """A stage that is to be run. earlier: what the run's record said of it; its result stays known."""
    fields = {"kind": config.kind, "inputs": dict(config.inputs), "config": config_digest(config), "state": "waiting"}
    return earlier.changed(**fields) if earlier is not None else StageRecord(**fields)


def open_run(
    name: str,
    *,
    file: str,
    preset: str,
    overrides: Sequence[str],
    only: Sequence[str] = (),
    keeps_stale: bool = False,
    flow_run: str = "",
) -> Run:
    """Resolve the config and begin, or resume, the run of that name.

    only: stages that are run this time; what the record says of the others stays. keeps_stale: so stay finished ones
    that are stale, unless they must be run for another reason (stale_stages.left_alone). flow_run: Prefect's id.

    Raises ConfigError for a wrong config or name, or a sweep's or night's, StoreBusy when a live process executes it.
    """
    resolved = resolve(pipeline_file(file), preset, overrides)
    store = store_of(resolved.pipeline)
    before = store.find_run(name)
    if before is not None and before.machine != str(resolved.machine):
        resolved = resolve(pipeline_file(file), preset, overrides, machine=machine_of(before.machine))
    run = Run(name, resolved, store, pipeline_file(file).parent, flow_run)
    if unknown := [stage for stage in only if stage not in run.pipeline.stages]:
        raise ConfigError(f"{pipeline_file(file)} has no stage {unknown[0]!r} any more; it has {', '.join(run.order)}.")
    check_name(name)
    refuse_composed(name, before)
    take_python_path(store.local, name)
    if keeps_stale and before is not None and (kept_stale := left_alone(before, run.pipeline)):
        only = [stage for stage in run.order if stage not in kept_stale]
    run.to_do = [stage for stage in run.order if not only or stage in only]
    check_gpus(name, resolved, run.to_do, before)
    for text in resolved.warnings:
        log.warning("%s.", text)
    refuse_busy("Run", before)
    known = before.stages if before is not None else {}
    stages = {}
    for stage in run.order:
        config, earlier = run.pipeline.stages[stage], known.get(stage)
        if only and stage not in only and earlier is not None:
            stages[stage] = earlier.changed(config=config_digest(config))
        else:
            forced = earlier.forced if earlier is not None else None
            stages[stage] = waiting_stage(config, earlier if only else None).changed(forced=forced)
    return begin(run, stages, before, file=str(pipeline_file(file)), overrides=tuple(overrides))


def check_name(name: str) -> None:
    """Raise ConfigError for what cannot be a run's name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}", name):
        raise ConfigError(f"Run name {name!r}: use letters, digits, '.', '_' and '-', at most 80.")


def join_run(name: str, store: Store) -> Run:
    """A run of another process, for one stage of it here: as its record says, nothing resolved again."""
    record = store.own_run(name)
    check_owner(Path(record.file))
    vouch_for(Path(record.file), record.pipeline["trusted_modules"])
    resolved = Resolved(
        pipeline=Pipeline.model_validate(record.pipeline), origins=record.origins, machine=machine_of(record.machine)
    )
    check_trust(resolved.pipeline, Path(record.file))
    run = Run(name, resolved, store, Path(record.file).parent, record.flow_run)
    run.is_joined = True
    run.composed = record.composed
    return run


def check_gpus(name: str, resolved: Resolved, stages: Sequence[str], record: RunRecord | None) -> None:
    """Raise ConfigError when a run was begun on a machine with more GPUs than this one, and those of these stages that
    its record has not finished take more than there are. With settings of this machine they would have other keys."""
    there, here = resolved.machine, detect()
    if there.num_gpus <= here.num_gpus:
        return
    known = record.stages if record is not None else {}
    open_stages = [stage for stage in stages if stage not in known or not known[stage].has_ended_well]
    configs = {stage: resolved.pipeline.stages[stage] for stage in open_stages}
    demands = [(config.num_gpus(here.num_gpus), stage) for stage, config in configs.items() if config.is_on_gpus_here]
    most, stage = max(demands, default=(0, ""))
    if most > here.num_gpus:
        raise ConfigError(
            f"Run {name} was begun on {there.short}: its stage {stage} takes {counted(most, 'GPU')}, and this machine "
            f"({here.short}) has {here.num_gpus or 'none'}. Resume it where there are as many, or begin another run "
            "here, with another --name: what is finished and does not depend on the machine is found in the store."
        )


def unfinished(pipeline: Pipeline, record: RunRecord | None) -> list[str]:
    """Stages that a record has not as finished with the config that they have now; all without a record."""
    known = record.stages if record is not None else {}
    made = {name: entry.made for name, entry in known.items() if entry.has_ended_well and entry.made is not None}
    stages = pipeline.stages.items()
    return [name for name, config in stages if name not in made or made[name].config not in ("", config_digest(config))]


def recorded_run(
    store: Store, name: str, *, stage: str = "", begin_at: str = "", stale: bool = False, overrides: Sequence[str] = ()
) -> tuple[tuple[str, ...], RunRecord]:
    """Stages that are to be run again: one alone, one (`begin_at`) and all that follow it, or what is stale or not
    finished (`stale`); and the run's record with more overrides for these.

    Raises ArtifactNotFound for an unknown run, ConfigError for a sweep or night, for an unknown stage, for nothing that
    is stale, or an override of another stage: its results would no longer be those of this run.
    """
    store.read_run(name)  # says which runs there are, when there is none of that name
    record = store.own_run(name)
    refuse_composed(name, record)
    first = stage or begin_at
    if stale:
        is_stale = stale_stages(record)
        stages = tuple(s for s, entry in record.stages.items() if s in is_stale or not entry.has_ended_well)
        if not stages:
            raise ConfigError(f"Nothing of run {name} is stale or unfinished: there is nothing to build again.")
    elif first not in record.stages:
        near = nearest(first, list(record.stages))
        raise ConfigError(f"Run {name} has no stage {first!r}; it has {', '.join(record.stages)}.{near}")
    else:
        inputs = {name: entry.inputs for name, entry in record.stages.items()}
        stages = (stage,) if stage else following(inputs, begin_at)
    allowed = (*stages, "unchecked")
    foreign = [text for text in overrides if text.partition("=")[0].partition(".")[0] not in allowed]
    if foreign:
        raise ConfigError(
            f"Override {foreign[0]!r} is not of stage {' or '.join(stages)}; run the whole pipeline with it instead."
        )
    return stages, record.changed(overrides=tuple(merged([*record.overrides, *overrides])))


def refuse_composed(name: str, record: RunRecord | None) -> None:
    """Raise ConfigError for a sweep or a night: executed as a run, it would lose its record to a plain preset's."""
    if record is None or not record.composed:
        return
    what, way = "night", "evaluate again with: nanodag nightly run"
    if record.sweep is not None:
        what, way = "sweep", f"by nanodag sweep --name {name} and what it was started with"
    raise ConfigError(
        f"{name} is a {what}: resume it by Retry in the UI, or {way}. For a run of its own choose another name."
    )


def merged(overrides: Sequence[str]) -> list[str]:
    """The same overrides, each name only where it was given last: that is the one that holds."""
    last: dict[str, str] = {}
    for text in overrides:
        name = text.partition("=")[0]
        last.pop(name, None)
        last[name] = text
    return list(last.values())


def recorded_inputs(run: Run, stage: str, labels: Sequence[str]) -> dict[str, StageResult]:
    """Inputs of a stage with these labels, by the run's record. Raises ArtifactNotFound when one is not there yet."""
    stages = run.store.read_run(run.name).stages
    results = {}
    for label in labels:
        source = run.pipeline.stages[stage].inputs[label]
        entry = stages[source]
        if entry.has_ended_well and entry.artifact is not None:
            artifact = run.store.attempt(*entry.artifact)
            results[label] = result_of(source, artifact, was_found=True)
        elif not find_kind(run.pipeline.stages[stage].kind).takes_what_exists:
            raise ArtifactNotFound(
                f"Stage {stage} of run {run.name} needs stage {source}, which is {entry.state}: run that."
            )
    return results


def result_of(stage: str, artifact: Artifact, *, was_found: bool) -> StageResult:
    return StageResult(stage=stage, was_found=was_found, **{name: getattr(artifact, name) for name in _OF_ARTIFACT})


def lineage_of(inputs: Mapping[str, StageResult]) -> dict[str, dict[str, str]]:
    """Manifest's entry of each input: label -> stage, kind, key, attempt and digest."""
    return {label: {f: getattr(result, f) for f in ("stage", *_OF_ARTIFACT)} for label, result in inputs.items()}


def served_store(file: str = "", url: str = "") -> Store:
    """The store at a URL, else of NANODAG_STORE, else of the pipeline file: the one that this process looks into."""
    overrides = [f"store.url={json.dumps(url, ensure_ascii=False)}"] if url else []
    return store_of(resolve(pipeline_file(file), overrides=overrides).pipeline)


def store_of(pipeline: Pipeline) -> Store:
    local = None if pipeline.store.local == "auto" else Path(pipeline.store.local)
    return Store(pipeline.store.url, local=local)


def locations_of(pipeline: Pipeline, store: Store) -> list[str]:
    """Store, mirror and CORE's bundle as overrides, for a process with another environment and working directory.
    Quoted: a path may hold what means something in YAML."""
    values = {"store.url": store.url, "mirror": pipeline.mirror, "core_bundle": pipeline.core_bundle}
    return [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]


def state_of(record: RunRecord) -> str:
    """A run's state as it is shown: `interrupted` of one whose process is gone, `stale` of one that has completed and
    of which a stage was built again since (nanodag.run.stale_stages)."""
    if record.is_gone:
        return "interrupted"
    return "stale" if record.state == "completed" and stale_stages(record) else record.state


def context_stages(
    store: Store,
    record: RunRecord,
    stages: Iterable[str],
    *,
    is_read: Callable[[Artifact], bool],
    has_records: Callable[[Artifact], bool] = lambda artifact: False,
) -> dict[str, Any]:
    """The finished ones of these stages, as nanodag.report lists them: manifest, files, records.

    stages: in the DAG's order. is_read: whether a stage's files and records are wanted too; the others have none.
    has_records: whether its records alone are, which a remote store gives up to MOST_RECORDS bytes.
    """
    shown: dict[str, Any] = {}
    for stage in stages:
        entry = record.stages[stage]
        if entry.artifact is None:
            continue
        artifact = store.attempt(*entry.artifact)
        # Another run may have built this artifact under other stage names; here it is called as in this run. What it
        # was made of may be the run's no more: then it is what the manifest says.
        lineage = {
            label: {"stage": source, **{f: shown[source][f] for f in _OF_ARTIFACT}}
            if shown[source]["digest"] == artifact.lineage.get(label, {}).get("digest")
            else artifact.lineage[label]
            for label, source in entry.inputs.items()
            if source in shown and label in artifact.lineage
        }
        folders = {"files": "", "records": ""}
        if is_read(artifact):
            folders["files"] = str(store.verified(artifact, "files"))
        num_bytes = sum(facts["bytes"] for facts in artifact.records.values())
        if folders["files"] or ((not store.is_remote or num_bytes <= MOST_RECORDS) and has_records(artifact)):
            folders["records"] = str(store.verified(artifact, "records"))
        shown[stage] = {**{field: getattr(artifact, field) for field in _REPORTED}, "lineage": lineage, **folders}
    return shown


def unfinished_stages(record: RunRecord, finished: Mapping[str, Any]) -> dict[str, Any]:
    """The other stages of a run in the same form; attempt and digest are empty, records the workspace of one begun."""
    shown = dict(finished)
    for stage, entry in record.stages.items():
        if stage not in finished:
            made_of = {n: {"stage": source, **shown[source]} for n, source in entry.inputs.items() if source in shown}
            blank = {"attempt": "", "digest": "", "metrics": {}, "cost": {}, "files": "", "records": entry.workspace}
            config = record.pipeline["stages"].get(stage, {})  # a night's page is in no pipeline
            about = {"kind": entry.kind, "key": entry.key or stage, "config": config, "lineage": made_of}
            shown[stage] = {**about, **blank}
    return {stage: raw for stage, raw in shown.items() if stage not in finished}
