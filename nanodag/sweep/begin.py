"""A sweep as a run: begun, and what of it the store has already looked up at once, without a task for each stage."""

import os
import re
import time
from collections.abc import Sequence
from typing import Any

from nanodag.config import resolve
from nanodag.errors import ConfigError, StoreBusy
from nanodag.nightly.nights import PREFIX as NIGHT
from nanodag.run.build_stage import key_of
from nanodag.run.composed import open_composed
from nanodag.run.record import Run, StageResult, is_alive, pipeline_file, result_of, store_of
from nanodag.run.stale import config_digest
from nanodag.sweep.points import Sweep, make_sweep


def begin_sweep(
    name: str,
    *,
    grid: Sequence[str],
    points: Sequence[Sequence[str]],
    stage: str,
    preset: str,
    overrides: Sequence[str],
    file: str,
    flow_run: str,
) -> tuple[Sweep, Run]:
    """Begin a sweep, or resume the one of that name. Parameters as nanodag.sweep.points.make_sweep has them.

    Raises ConfigError, and StoreBusy when another process that is alive runs it.
    """
    path = pipeline_file(file)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}", name) or name.startswith(NIGHT):
        raise ConfigError(f"Sweep name {name!r}: use letters, digits, '.', '_' and '-', at most 80, not {NIGHT}...")
    store = store_of(resolve(path, preset, overrides).pipeline)
    before = store.read_run(name) if name in store.runs() else {}
    if before and "sweep" not in before:
        raise ConfigError(f"{name} is a run of {store.url} that is no sweep; choose another name.")
    if is_alive(before) and before["pid"] != os.getpid():
        raise StoreBusy(f"Sweep {name} is under way in process {before['pid']}; wait for it, or stop it.")
    sweep = make_sweep(path, preset, overrides, grid, points, stage)
    about = {"sweep": {"stage": sweep.stage, "points": [vars(point) for point in sweep.points]}}
    to_do = list(sweep.pipeline.stages)
    run = open_composed(
        name, sweep.pipeline, store, file=path, to_do=in_waves(sweep, to_do), flow_run=flow_run, about=about
    )
    return sweep, run


def in_waves(sweep: Sweep, stages: Sequence[str]) -> list[str]:
    """Stages so that all points' first ones come before any point's second; inputs always come first."""
    depth: dict[str, int] = {}
    for stage in stages:  # a point's stages stand in the DAG's order, and later points only name earlier stages
        depth[stage] = 1 + max((depth[source] for source in sweep.pipeline.stages[stage].inputs.values()), default=0)
    return sorted(stages, key=lambda stage: depth[stage])


def find_built(run: Run) -> dict[str, StageResult]:
    """What the store has of a run's stages, noted in its record at once; what needs a missing one is missing too."""
    found: dict[str, StageResult] = {}
    notes: dict[str, dict[str, Any]] = {}
    now = time.time()
    for stage in run.to_do:
        config = run.pipeline.stages[stage]
        if not set(config.inputs.values()) <= set(found):
            continue
        key, _ = key_of(run, config, {label: found[source] for label, source in config.inputs.items()})
        artifact = run.store.lookup(key)
        if artifact is None:
            continue
        made_of = {label: found[source].digest for label, source in config.inputs.items()}
        found[stage] = result_of(stage, artifact, was_found=True)
        notes[stage] = {
            **{"state": "found", "reason": "", "started": now, "ended": now, "took_s": 0.0, "cost": artifact.cost},
            **{"key": key, "attempt": artifact.attempt, "digest": artifact.digest, "bytes": artifact.num_bytes},
            **{"made_of": made_of, "made_with": config_digest(config)},
        }

    def note(record: dict[str, Any]) -> None:
        for stage, facts in notes.items():
            record["stages"][stage].update(facts)

    run.store.change_run(run.name, note)
    return found
