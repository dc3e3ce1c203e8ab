"""One run of a pipeline: its resolved config, its store, and the record of what became of each stage."""

import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from nanodag.config import Pipeline, Resolved, order_of, resolve
from nanodag.config.resolve import read_document
from nanodag.config.trust import check_owner, check_trust
from nanodag.errors import ArtifactNotFound, ConfigError, StoreBusy
from nanodag.errors.words import nearest
from nanodag.host.folders import PROJECT
from nanodag.run.kinds import KINDS
from nanodag.run.python_path import take_python_path
from nanodag.run.stale import ENDED_WELL, config_digest, following, left_alone, stale_stages
from nanodag.store import Artifact, Store
from nanodag.store.provenance import code_revision, is_process, process_started


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a stage hands to those after it. was_found: the store had it already; digest: its content's."""

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
        if str(code_path) not in sys.path:
            sys.path.append(str(code_path))  # last, as in a worker
        self.pipeline: Pipeline = resolved.pipeline
        self.origins: Mapping[str, str] = resolved.origins
        self.store = store
        self.stop = threading.Event()
        self.to_do = self.order
        self.is_joined = False  # another process opened it and closes it; this one runs a stage of it
        self.composed = ""  # `sweep` or `nightly` for a run that nanodag.run.composed opened
        self.restarts: Counter[str] = Counter()  # by stage: how often it was begun in this process
        self.at_once = 1  # stages that train side by side where there is no GPU

    @property
    def order(self) -> list[str]:
        """Stage names, inputs first. to_do: those of them that are run this time."""
        return order_of(self.pipeline)

    def note(self, stage: str, **fields: Any) -> None:
        """Change what the run's record says about one stage."""
        self.store.change_run(self.name, lambda record: record["stages"][stage].update(fields))

    def note_key(self, stage: str, key: str) -> None:
        """Record the key that a stage is going to have; what it was finished with under another one is not its result
        any more."""

        def change(record: dict[str, Any]) -> None:
            entry = record["stages"][stage]
            if entry.get("key") != key:
                for field in ("attempt", "digest", "made_of", "made_with", "bytes"):
                    entry.pop(field, None)
            entry["key"] = key

        self.store.change_run(self.name, change)

    def entry(self, stage: str) -> dict[str, Any]:
        """What the run's record says about one stage."""
        return self.store.read_run(self.name)["stages"][stage]

    def close(self) -> None:
        """Record that nothing of this run is under way any more, and how it ended: `completed`, `failed`, `stopped`."""
        self.store.change_run(self.name, _end)


def _end(record: dict[str, Any]) -> None:
    for stage in record["stages"].values():
        if stage["state"] == "waiting":
            stage["state"] = "found" if "attempt" in stage else "not run"  # what an earlier run of this name left
        elif stage["state"] == "running":
            stage.update(state="stopped", ended=time.time())
    states = {stage["state"] for stage in record["stages"].values()}
    state = "failed" if "failed" in states else "completed" if states <= set(ENDED_WELL) else "stopped"
    reasons = [f"{name}: {s['reason']}" for name, s in record["stages"].items() if s["state"] == "failed"]
    record.update(state=state, reason="\n".join(reasons), ended=time.time())
    if state == "completed":
        record["before"] = []


def left_before(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """What a record refers to, for the record that takes its place: the store keeps that until the run has completed.

    A stage that is not finished gives its key alone: all attempts under it, and its workspace.
    """
    found = []
    for entry in [*record.get("stages", {}).values(), *record.get("before", [])]:
        if "key" in entry:
            is_finished = "attempt" in entry and entry.get("state", "built") in ENDED_WELL
            one = {"key": entry["key"], **({"attempt": entry["attempt"]} if is_finished else {})}
            if one not in found:
                found.append(one)
    return found


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

    only: stages that are run this time; what the record says of the others stays. keeps_stale: so stay finished
    ones that are stale, unless they must be run for another reason (nanodag.run.stale.left_alone). flow_run:
    Prefect's id.

    Raises ConfigError for a wrong config or name, or a sweep's or night's, StoreBusy when a process that is alive
    executes that run.
    """
    check_owner(pipeline_file(file))
    resolved = resolve(pipeline_file(file), preset, overrides)
    store = store_of(resolved.pipeline)
    run = Run(name, resolved, store, pipeline_file(file).parent, flow_run)
    if unknown := [stage for stage in only if stage not in run.pipeline.stages]:
        raise ConfigError(f"{pipeline_file(file)} has no stage {unknown[0]!r} any more; it has {', '.join(run.order)}.")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}", name):
        raise ConfigError(f"Run name {name!r}: use letters, digits, '.', '_' and '-', at most 80.")
    before = store.read_run(name) if name in store.runs() else {}
    refuse_composed(name, before)
    take_python_path(store.local, name)
    if keeps_stale and before and (kept_stale := left_alone(before, run.pipeline)):
        only = [stage for stage in run.order if stage not in kept_stale]
    run.to_do = [stage for stage in run.order if not only or stage in only]
    if is_alive(before) and before["pid"] != os.getpid():
        raise StoreBusy(f"Run {name} is under way in process {before['pid']}; wait for it, or stop it.")
    kept = before.get("stages", {}) if only else {}
    stages = {
        stage: {**kept[stage], "config": config_digest(config)}
        if only and stage not in only and stage in kept
        else {
            **kept.get(stage, {}),
            "kind": config.kind,
            "inputs": dict(config.inputs),
            "config": config_digest(config),
            "state": "waiting",
            "forced": before.get("stages", {}).get(stage, {}).get("forced", []),
        }
        for stage, config in run.pipeline.stages.items()
    }
    record = {
        "run": name,
        "created": before.get("created", time.time()),
        "started": time.time(),
        "state": "running",
        "reason": "",
        "file": str(pipeline_file(file)),
        "preset": run.pipeline.preset,
        "overrides": list(overrides),
        "pipeline": run.pipeline.model_dump(mode="json"),
        "origins": dict(run.origins),
        "order": run.order,
        "stages": stages,
        "before": left_before(before),
        "revision": code_revision(),
        "flow_run": flow_run,
        "pid": os.getpid(),
        "pid_started": process_started(psutil.Process()),
    }
    store.replace_run(name, record)
    return run


def join_run(name: str, store: Store) -> Run:
    """A run of another process, for one stage of it here: as its record says, nothing resolved again."""
    record = store.read_run(name)
    resolved = Resolved(pipeline=Pipeline.model_validate(record["pipeline"]), origins=record["origins"])
    check_trust(resolved.pipeline, Path(record["file"]))
    run = Run(name, resolved, store, Path(record["file"]).parent, record["flow_run"])
    run.is_joined = True
    run.composed = next((kind for kind in ("sweep", "nightly") if kind in record), "")
    return run


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What it takes to open a run again. stages: those that are to be run."""

    file: str
    preset: str
    overrides: list[str]
    stages: tuple[str, ...]


def recorded_run(
    store: Store, name: str, *, stage: str = "", begin_at: str = "", stale: bool = False, overrides: Sequence[str] = ()
) -> Recorded:
    """What a run's record says, for one of its stages alone, for one (`begin_at`) and all that follow it, or for what
    is stale or not finished (`stale`); with more overrides for these.

    Raises ArtifactNotFound for an unknown run, ConfigError for a sweep or night, for an unknown stage, for nothing that
    is stale, or an override of another stage: its results would no longer be those of this run.
    """
    store.read_run(name)  # says which runs there are, when there is none of that name
    record = store.own_run(name)
    refuse_composed(name, record)
    first = stage or begin_at
    if stale:
        is_stale = stale_stages(record)
        stages = tuple(s for s in record["order"] if s in is_stale or record["stages"][s]["state"] not in ENDED_WELL)
        if not stages:
            raise ConfigError(f"Nothing of run {name} is stale or unfinished: there is nothing to build again.")
    elif first not in record["stages"]:
        near = nearest(first, record["order"])
        raise ConfigError(f"Run {name} has no stage {first!r}; it has {', '.join(record['order'])}.{near}")
    else:
        stages = (stage,) if stage else following(record, begin_at)
    own = (*stages, "unchecked")
    foreign = [text for text in overrides if text.partition("=")[0].partition(".")[0] not in own]
    if foreign:
        raise ConfigError(
            f"Override {foreign[0]!r} is not of stage {' or '.join(stages)}; run the whole pipeline with it instead."
        )
    overrides = merged([*record["overrides"], *overrides])
    return Recorded(file=record["file"], preset=record["preset"], overrides=overrides, stages=stages)


def refuse_composed(name: str, record: Mapping[str, Any]) -> None:
    """Raise ConfigError for a sweep or a night: executed as a run, it would lose its record to a plain preset's."""
    if "sweep" in record:
        raise ConfigError(
            f"{name} is a sweep: resume it by Retry in the UI, or by nanodag sweep --name {name} and what it was "
            "started with. For a run of its own choose another name."
        )
    if "nightly" in record:
        raise ConfigError(
            f"{name} is a night: resume it by Retry in the UI, or evaluate again with: nanodag nightly run. For a "
            "run of its own choose another name."
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
    """Those inputs of a stage as the run's record names them. Raises ArtifactNotFound when one is not there yet."""
    stages = run.store.read_run(run.name)["stages"]
    found = {}
    for label in labels:
        source = run.pipeline.stages[stage].inputs[label]
        if stages[source]["state"] in ENDED_WELL:
            entry = stages[source]
            artifact = run.store.attempt(entry["key"], entry["attempt"])
            found[label] = result_of(source, artifact, was_found=True)
        elif not KINDS[run.pipeline.stages[stage].kind].takes_what_exists:
            state = stages[source]["state"]
            raise ArtifactNotFound(f"Stage {stage} of run {run.name} needs stage {source}, which is {state}: run that.")
    return found


def result_of(stage: str, artifact: Artifact, *, was_found: bool) -> StageResult:
    """An artifact as the result of a run's stage."""
    return StageResult(
        stage=stage,
        kind=artifact.kind,
        key=artifact.key,
        attempt=artifact.attempt,
        digest=artifact.digest,
        was_found=was_found,
    )


def stage_names() -> list[str]:
    """Every stage name of the presets in the pipeline file: the choices of a form."""
    document = read_document(pipeline_file(""))
    tables = [document, *document["presets"].values()]
    return list(dict.fromkeys(name for table in tables for name in table.get("stages", {})))


def pipeline_file(file: str) -> Path:
    """The pipeline file that was named; else NANODAG_FILE's, the working directory's, the one nanodag comes with."""
    if file or (file := os.environ.get("NANODAG_FILE", "")):
        return Path(file).absolute()
    here = Path("pipeline.yaml").absolute()
    return here if here.exists() else PROJECT / "pipeline.yaml"


def served_store() -> Store:
    """The store that this process serves: of NANODAG_STORE, else of the pipeline file."""
    return store_of(resolve(pipeline_file("")).pipeline)


def store_of(pipeline: Pipeline) -> Store:
    """The store that a pipeline names."""
    local = None if pipeline.store.local == "auto" else Path(pipeline.store.local)
    return Store(pipeline.store.url, local=local)


def locations_of(pipeline: Pipeline, store: Store) -> list[str]:
    """Store and mirror as overrides, for a process with another environment and working directory. Quoted: a path may
    hold what means something in YAML."""
    values = {"store.url": store.url, "mirror": pipeline.mirror}
    return [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]


def is_alive(record: Mapping[str, Any]) -> bool:
    """True when the process of a run, as its record says, is there."""
    if record.get("state") != "running":
        return False
    try:
        process = psutil.Process(record["pid"])
        # Process ids come around again, so the start must fit too.
        return process.status() != psutil.STATUS_ZOMBIE and is_process(process, record["pid_started"])
    except psutil.NoSuchProcess:
        return False


def state_of(record: Mapping[str, Any]) -> str:
    """A run's state as it is shown: `interrupted` of one whose process is gone, `stale` of one that has completed and
    of which a stage was built again since (nanodag.run.stale)."""
    if record["state"] == "running" and not is_alive(record):
        return "interrupted"
    return "stale" if record["state"] == "completed" and stale_stages(record) else record["state"]
