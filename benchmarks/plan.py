"""Holds the plan of a run against what its stages then took: `python -m benchmarks.plan RUN`.

Reads the run's record: its resolved pipeline, the machine that it was resolved for, and the cost of each stage that
was built. Prints memory at its peak and seconds by the clock, each predicted and measured, with the error. On a busy
machine only memory means something. Bounds: memory within 25 %, time within 30 %.

`--predict PRESET OVERRIDES...` prints the predictions alone, to be written down before a run.
"""

import argparse
import json
import sys
from collections.abc import Mapping

from nanodag.config import Pipeline, resolve
from nanodag.host.machine import Machine, detect, machine_of
from nanodag.plan.make import plan_of
from nanodag.plan.stage_plan import StagePlan
from nanodag.run.record import pipeline_file, store_of
from nanodag.store.run_record import RunRecord

MEMORY_BOUND, TIME_BOUND = 0.25, 0.30
COLUMNS = ("memory", "seconds")


def predicted(plan: StagePlan) -> dict[str, float]:
    """Bytes of host memory, and seconds."""
    return {"memory": plan.host_bytes, "seconds": plan.seconds or 0.0}


def measured(cost: Mapping[str, float]) -> dict[str, float]:
    """The same of a stage that was built."""
    return {"memory": cost["peak_bytes"], "seconds": cost["seconds"]}


def error_of(guess: float, found: float) -> float:
    """How far a prediction is off, as a share of what was found: 0.1 for 10 % too much."""
    return guess / found - 1 if found else float("inf")


def compare(record: RunRecord, pipeline: Pipeline, machine: Machine) -> list[dict[str, object]]:
    """A row for each stage that the run built: what was predicted, what was measured, and the error of each."""
    rows: list[dict[str, object]] = []
    for plan in plan_of(pipeline, machine).stages:
        entry = record.stages.get(plan.name)
        if entry is None or entry.made is None or not plan.processes:
            continue
        guess, found = predicted(plan), measured(entry.made.cost)
        errors = {name: error_of(guess[name], found[name]) for name in COLUMNS}
        rows.append({"stage": plan.name, "predicted": guess, "measured": found, "errors": errors})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", default="")
    parser.add_argument("--file", default="")
    parser.add_argument("--on", default="", help="the machine; default: the run's, or this one")
    parser.add_argument("--predict", nargs="+", default=[], metavar="PRESET", help="a preset and overrides")
    asked = parser.parse_args()
    if asked.predict:
        machine = machine_of(asked.on) if asked.on else detect()
        preset, *overrides = asked.predict
        pipeline = resolve(pipeline_file(asked.file), preset, overrides, machine=machine).pipeline
        rows = [{"stage": plan.name, **predicted(plan)} for plan in plan_of(pipeline, machine).stages]
        sys.stdout.write(json.dumps({"machine": str(machine), "stages": rows}, indent=1) + "\n")
        return 0
    store = store_of(resolve(pipeline_file(asked.file)).pipeline)
    record = store.read_run(asked.run)
    machine = machine_of(asked.on or record.machine)
    rows = compare(record, Pipeline.model_validate(record.pipeline), machine)
    _print(rows)
    return 0 if all(_is_within(row) for row in rows) else 1


def _print(rows: list[dict[str, object]]) -> None:
    sys.stdout.write("| stage | " + " | ".join(f"{name}: predicted, measured, error" for name in COLUMNS) + " |\n")
    sys.stdout.write("|---" * (1 + len(COLUMNS)) + "|\n")
    for row in rows:
        cells = []
        for name in COLUMNS:
            guess, found, error = (row[part][name] for part in ("predicted", "measured", "errors"))  # type: ignore[index]
            unit = 1e6 if name == "memory" else 1
            cells.append(f"{guess / unit:.0f}, {found / unit:.0f}, {error:+.0%}")
        sys.stdout.write(f"| {row['stage']} | " + " | ".join(cells) + " |\n")


def _is_within(row: dict[str, object]) -> bool:
    errors = row["errors"]
    assert isinstance(errors, dict)
    return abs(errors["memory"]) <= MEMORY_BOUND and abs(errors["seconds"]) <= TIME_BOUND


if __name__ == "__main__":
    sys.exit(main())
