"""What commands cost on a large store: `python -m benchmarks.store [--artifacts 1000]`.

A store of that many small artifacts is made, ten to a run, in a temporary folder. Then each command is started as a
user starts it, several times; printed are the medians of CPU-seconds (user + system, the start included) and of
wall seconds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nanodag.store import Store
from nanodag.store.run_record import Made, RunRecord, StageRecord

STAGES_A_RUN = 10
COMMANDS = (
    ("status",),
    ("status", "--all"),
    ("stages",),
    ("gc",),
    ("lineage", "run-0000:s9"),
    ("diff", "run-0000", "run-0001"),
)


def fill(store: Store, num_artifacts: int, product: Path) -> None:
    """Chains of stages, as runs leave them: every artifact with a lineage, eight files and a record."""
    product.mkdir()
    for number in range(8):
        (product / f"file-{number}").write_text(str(number) * 100)
    pipeline = {f"option-{number}": number for number in range(250)}
    for run in range(num_artifacts // STAGES_A_RUN):
        stages: dict[str, StageRecord] = {}
        lineage: dict[str, dict[str, str]] = {}
        for number in range(STAGES_A_RUN):
            artifact = store.publish(
                f"{run:08x}{number:02x}".ljust(40, "0"),
                product,
                kind="sft",
                stage=f"s{number}",
                config=pipeline,
                lineage=lineage,
                sources={"file:x": {"kind": "file", "sha256": "0" * 64}},
                metrics={"loss": 1.0},
                cost={"seconds": 1.0, "cpu_seconds": 1.0},
                environment={"revision": "0" * 12},
                records=product,
            )
            about = {"kind": "sft", "key": artifact.key, "attempt": artifact.attempt, "digest": artifact.digest}
            lineage = {"model": {"stage": f"s{number}", **about}}
            made = Made(attempt=artifact.attempt, digest=artifact.digest, num_bytes=artifact.num_bytes, took_s=1.0)
            stages[f"s{number}"] = StageRecord(kind="sft", state="built", key=artifact.key, made=made)
        store.write_run(_record(run, stages, pipeline))


def _record(number: int, stages: dict[str, StageRecord], pipeline: dict[str, Any]) -> RunRecord:
    now = time.time()
    return RunRecord(
        number=number + 1,
        run=f"run-{number:04d}",
        created=now,
        started=now,
        ended=now,
        state="completed",
        file="/none/pipeline.yaml",
        preset="pocket",
        overrides=(),
        pipeline=pipeline,
        machine="cpu:2:avx2:8GiB",
        origins={name: "default" for name in pipeline},
        stages=stages,
        revision="0" * 12,
        flow_run="",
        pid=1,
        pid_started=-1.0,
    )


def measured(command: tuple[str, ...], folder: Path) -> tuple[float, float]:
    """CPU-seconds and wall seconds of one call."""
    environment = {**os.environ, "NANODAG_STORE": str(folder)}
    before, began = os.times(), time.monotonic()
    arguments = [sys.executable, "-c", "from nanodag.cli import main; main()", *command]
    subprocess.run(arguments, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu_s, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifacts", type=int, default=1000)
    parser.add_argument("--store", type=Path, help="A store that is there already.")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.store or Path(name) / "store"
        if options.store is None or not options.store.exists():
            fill(Store(folder), options.artifacts, Path(name) / "product")
        print(f"{len(Store(folder).keys())} artifacts, {len(Store(folder).runs())} runs")
        for command in COMMANDS:
            calls = [measured(command, folder) for _ in range(options.repeats)]
            cpu_s, wall_s = (statistics.median(values) for values in zip(*calls))
            print(f"nanodag {' '.join(command):<32} {cpu_s:6.2f} CPU-s  {wall_s:6.2f} s", flush=True)


if __name__ == "__main__":
    main()
