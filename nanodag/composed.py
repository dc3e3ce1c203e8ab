"""Runs whose pipeline is put together in code, out of what a file says and what the store has: nights and sweeps."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from nanodag.config import Pipeline, Resolved
from nanodag.provenance import code_revision
from nanodag.runs import Run
from nanodag.store import Store


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
    """Begin such a run, or go on with it: what its record said before of the same stages stays known.

    to_do: the stages that are carried out, inputs first; those alone are in the record. about: what else the record
    says, such as what kind of run this is.
    """
    before = store.read_run(name) if name in store.runs() else {}
    stages = {}
    for stage in to_do:
        config = pipeline.stages[stage]
        facts = {"kind": config.kind, "inputs": dict(config.inputs), "state": "waiting", "forced": []}
        stages[stage] = {**before.get("stages", {}).get(stage, {}), **facts}
    record = {
        **{"run": name, "state": "running", "reason": "", "flow_run": flow_run, "revision": code_revision()},
        **{"created": before.get("created", time.time()), "started": time.time()},
        **{"pid": os.getpid(), "pid_started": psutil.Process().create_time()},
        **{"file": str(file), "preset": pipeline.preset, "overrides": [], "origins": {}},
        **{"pipeline": pipeline.model_dump(mode="json"), "order": list(to_do), "stages": stages},
        **about,
    }
    store.write_run(name, record)
    run = Run(name, Resolved(pipeline=pipeline, origins={}), store, file.parent)
    run.flow_run, run.to_do = flow_run, list(to_do)
    return run
