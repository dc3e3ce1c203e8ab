"""Runs whose pipeline is put together in code, out of what a file says and what the store has: nights and sweeps."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanodag.config import Pipeline, Resolved
from nanodag.config.derive_sampler import this_machine
from nanodag.host.machine import Machine, machine_of
from nanodag.run.python_path import take_python_path
from nanodag.run.record import Run, StageResult, begin, check_gpus, lineage_of, waiting_stage
from nanodag.store import Artifact, Store, stage_key
from nanodag.store.provenance import environment
from nanodag.store.run_record import Made, NightRecord, RunRecord, StageRecord, SweepRecord


def open_composed(
    name: str,
    pipeline: Pipeline,
    store: Store,
    *,
    file: Path,
    to_do: Sequence[str],
    flow_run: str,
    machine: Machine,
    about: SweepRecord | NightRecord,
) -> Run:
    """Begin such a run, or resume it: what its record said before of the same stages stays known.

    to_do: the stages that are run, inputs first; those alone are in the record. machine: for which the pipeline was
    resolved, see `machine_for`. about: what makes it a sweep or a night.

    Raises ConfigError when this machine lacks the GPUs of the one that it was begun on.
    """
    resolved = Resolved(pipeline=pipeline, origins={}, machine=machine)
    run = Run(name, resolved, store, file.parent, flow_run)
    run.to_do = list(to_do)
    take_python_path(store.local, name)
    before = store.own_run(name) if store.find_run(name) is not None else None
    check_gpus(name, resolved, to_do, before)
    known = before.stages if before is not None else {}
    stages = {s: waiting_stage(pipeline.stages[s], known.get(s)).changed(forced=None) for s in to_do}
    kind = {"sweep": about} if isinstance(about, SweepRecord) else {"nightly": about}
    return begin(run, stages, before, file=str(file), overrides=(), **kind)


def machine_for(name: str, store: Store) -> Machine:
    """Machine that `auto` of a night or sweep follows from: the machine that it was begun on, else this one."""
    before = store.find_run(name)
    return machine_of(before.machine) if before is not None else this_machine()


def page_key(kind: str, config: Mapping[str, Any], results: Mapping[str, StageResult]) -> str:
    inputs = {stage: result.digest for stage, result in results.items()}
    return stage_key(kind=kind, code_version=1, config=config, inputs=inputs)


def publish_page(
    run: Run,
    kind: str,
    config: Mapping[str, Any],
    results: Mapping[str, StageResult],
    files: Mapping[str, str],
    metrics: Mapping[str, Any],
) -> Artifact:
    """Put a page into the store, as another attempt under its key. files: name -> text."""
    key = page_key(kind, config, results)
    folder = run.store.workspace(key) / "output"
    folder.mkdir(exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    artifact = run.store.publish(
        key,
        folder,
        kind=kind,
        stage=kind,
        config=dict(config),
        lineage=lineage_of(results),
        sources={},
        metrics=dict(metrics),
        cost={},
        environment=environment("cpu"),
    )
    run.store.discard_workspace(key)
    return artifact


def note_page(run: Run, kind: str, artifact: Artifact) -> None:
    """Let the run's record name its page: as a stage, after all others."""
    made = Made(attempt=artifact.attempt, digest=artifact.digest, num_bytes=artifact.num_bytes)
    entry = StageRecord(kind=kind, state="built", ended=time.time(), key=artifact.key, made=made)

    def add(record: RunRecord) -> RunRecord:
        others = {stage: other for stage, other in record.stages.items() if stage != kind}
        return record.changed(stages={**others, kind: entry})

    run.store.change_run(run.name, add)
