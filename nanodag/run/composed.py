"""Runs whose pipeline is put together in code, out of what a file says and what the store has: nights and sweeps."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from nanodag.config import Pipeline, Resolved
from nanodag.run.python_path import take_python_path
from nanodag.run.record import Run, StageResult, left_before
from nanodag.store import Artifact, Store, stage_key
from nanodag.store.provenance import code_revision, environment, process_started


def open_composed(
    name: str,
    pipeline: Pipeline,
    store: Store,
    *,
    file: Path,
    to_do: Sequence[str],
    flow_run: str,
    about: Mapping[str, Any],
) -> Run:
    """Begin such a run, or resume it: what its record said before of the same stages stays known.

    to_do: the stages that are run, inputs first; those alone are in the record. about: what else the record
    says; its first name is what kind of run this is, `sweep` or `nightly`.
    """
    take_python_path(store.local, name)
    before = store.own_run(name) if name in store.runs() else {}
    stages = {}
    for stage in to_do:
        config = pipeline.stages[stage]
        facts: dict[str, Any] = {"kind": config.kind, "inputs": dict(config.inputs), "state": "waiting", "forced": []}
        stages[stage] = {**before.get("stages", {}).get(stage, {}), **facts}
    record = {
        **{"run": name, "state": "running", "reason": "", "flow_run": flow_run, "revision": code_revision()},
        **{"created": before.get("created", time.time()), "started": time.time()},
        **{"pid": os.getpid(), "pid_started": process_started(psutil.Process())},
        **{"file": str(file), "preset": pipeline.preset, "overrides": [], "origins": {}},
        **{"pipeline": pipeline.model_dump(mode="json"), "order": list(to_do), "stages": stages},
        "before": left_before(before),
        **about,
    }
    store.replace_run(name, record)
    run = Run(name, Resolved(pipeline=pipeline, origins={}), store, file.parent)
    run.flow_run, run.to_do, run.composed = flow_run, list(to_do), next(iter(about), "")
    return run


def page_key(kind: str, config: Mapping[str, Any], results: Mapping[str, StageResult]) -> str:
    """The key of a page about these results."""
    inputs = {stage: result.digest for stage, result in results.items()}
    return stage_key(kind=kind, code_version=1, config=config, inputs=inputs, sources={})


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
        lineage={
            stage: {"stage": stage, "kind": r.kind, "key": r.key, "attempt": r.attempt, "digest": r.digest}
            for stage, r in results.items()
        },
        sources={},
        metrics=dict(metrics),
        cost={},
        environment=environment("cpu"),
    )
    run.store.discard_workspace(key)
    return artifact


def note_page(run: Run, kind: str, artifact: Artifact) -> None:
    """Let the run's record name its page: as a stage, after all others."""
    entry = {
        **{"kind": kind, "inputs": {}, "state": "built", "reason": "", "cost": {}, "forced": [], "ended": time.time()},
        **{"key": artifact.key, "attempt": artifact.attempt, "digest": artifact.digest, "bytes": artifact.num_bytes},
    }

    def add(record: dict[str, Any]) -> None:
        record["stages"][kind] = entry
        record["order"] = [*(stage for stage in record["order"] if stage != kind), kind]

    run.store.change_run(run.name, add)
