"""A sweep as a run: begun, what the store has of it looked up at once, and concluded by its page in the store."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanodag.config import resolve
from nanodag.errors import ConfigError, StoreBusy
from nanodag.nightly.nights import PREFIX as NIGHT
from nanodag.run.build_stage import key_of, made_from
from nanodag.run.derived_runs import machine_for, note_page, open_composed, page_key, publish_page
from nanodag.run.record import Run, StageResult, pipeline_file, result_of, store_of
from nanodag.store.run_record import RunRecord, SweepRecord
from nanodag.sweep.points import Sweep, make_sweep

PAGE_STAGE = "comparison"


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
    before = store.find_run(name)
    if before is not None and before.sweep is None:
        raise ConfigError(f"{name} is a run of {store.url} that is no sweep; choose another name.")
    if before is not None and before.is_alive and before.pid != os.getpid():
        raise StoreBusy(f"Sweep {name} is under way in process {before.pid}; wait for it, or stop it.")
    machine = machine_for(name, store)
    sweep = make_sweep(path, preset, overrides, grid, points, stage, machine=machine)
    about = SweepRecord(stage=sweep.stage, points=sweep.points)
    run = open_composed(
        name,
        sweep.pipeline,
        store,
        file=path,
        to_do=in_waves(sweep, list(sweep.pipeline.stages)),
        flow_run=flow_run,
        machine=machine,
        about=about,
    )
    return sweep, run


def in_waves(sweep: Sweep, stages: Sequence[str]) -> list[str]:
    """Stages so that all points' first ones come before any point's second; inputs always come first."""
    depth: dict[str, int] = {}
    for stage in stages:  # a point's stages stand in the DAG's order, and later points only name earlier stages
        depth[stage] = 1 + max((depth[source] for source in sweep.pipeline.stages[stage].inputs.values()), default=0)
    return sorted(stages, key=lambda stage: depth[stage])


def find_built(run: Run) -> dict[str, StageResult]:
    """Results that the store has of a run's stages, noted in its record at once; what needs a missing one is missing
    too."""
    results: dict[str, StageResult] = {}
    notes: dict[str, dict[str, Any]] = {}
    now = time.time()
    for stage in run.to_do:
        config = run.pipeline.stages[stage]
        if not set(config.inputs.values()) <= set(results):
            continue
        inputs = {label: results[source] for label, source in config.inputs.items()}
        key, _ = key_of(run, config, inputs)
        if (artifact := run.store.lookup(key)) is None:
            continue
        results[stage] = result_of(stage, artifact, was_found=True)
        made = made_from(artifact, config, inputs)
        notes[stage] = {"state": "found", "reason": "", "started": now, "ended": now, "key": key, "made": made}

    def note(record: RunRecord) -> RunRecord:
        noted = {stage: record.stages[stage].changed(**facts) for stage, facts in notes.items()}
        return record.changed(stages={**record.stages, **noted})

    run.store.change_run(run.name, note)
    return results


def conclude(sweep: Sweep, run: Run, results: Mapping[str, StageResult]) -> Path:
    """Compare the points and publish the page; one about the same results is found, not drawn again. Returns the path
    of sweep.html; its table lies beside it in sweep.md.

    results: stage of the sweep's pipeline -> its result; what failed is not in it.
    """
    config = {"stage": sweep.stage, "points": [[list(p.overrides), dict(p.stages)] for p in sweep.points]}
    artifact = run.store.lookup(page_key(PAGE_STAGE, config, results))
    if artifact is None:
        # They draw, and resample: a sweep of which nothing changed needs neither.
        from nanodag.report.page import to_html, to_markdown
        from nanodag.sweep.sweep_page import as_json, rows_of, sweep_report

        rows = rows_of(sweep, run, results)
        report = sweep_report(run.name, sweep, rows)
        files = {
            "sweep.html": to_html(report),
            "sweep.md": to_markdown(report),
            "sweep.json": json.dumps(as_json(rows), indent=1),
        }
        metrics = {"num_points": len(rows), "num_failed": sum(row.artifact is None for row in rows)}
        artifact = publish_page(run, PAGE_STAGE, config, results, files, metrics)
    note_page(run, PAGE_STAGE, artifact)
    return run.store.materialize(artifact) / "sweep.html"
