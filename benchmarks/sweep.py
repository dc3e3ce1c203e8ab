"""How long an unchanged sweep of 100 points takes to be resolved: `python -m benchmarks.sweep [--points 100]`.

The shipped pocket preset's SFT stage, with its evals, over a grid of rates and epochs. Every stage is published by
hand, with files of a few bytes, so what is timed is the control plane: resolving and checking each point, keys,
look-ups, the run's record. Not in it: Prefect's own start, and the comparison's page, which is found like a stage.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanodag.host.folders import PROJECT
from nanodag.run.build_stage import key_of
from nanodag.run.record import Run, StageResult, result_of
from nanodag.sweep.sweep_run import begin_sweep, find_built

FACTS: dict[str, Any] = {"config": {}, "lineage": {}, "sources": {}, "metrics": {}, "cost": {}, "environment": {}}


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print what a block took."""
    began, cpu = time.perf_counter(), sum(os.times()[:4])
    yield
    print(f"{what:28s} {sum(os.times()[:4]) - cpu:6.2f} CPU-s  {time.perf_counter() - began:6.2f} s", flush=True)


def publish_all(run: Run, folder: Path) -> None:
    """Put a file of a few bytes into the store for every stage."""
    results: dict[str, StageResult] = {}
    for stage in run.to_do:
        config = run.pipeline.stages[stage]
        key, _ = key_of(run, config, {label: results[source] for label, source in config.inputs.items()})
        (folder / stage).mkdir()
        (folder / stage / "made.txt").write_text(stage)
        artifact = run.store.publish(key, folder / stage, kind=config.kind, stage=stage, **FACTS)
        results[stage] = result_of(stage, artifact, was_found=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=100)
    num_points = parser.parse_args().points
    rates = ",".join(f"{0.001 * (n + 1):.4f}" for n in range(num_points // 2))
    grid = [f"sft.optimizer.learning_rate=[{rates}]", "sft.num_epochs=[1,2]"]
    with tempfile.TemporaryDirectory() as name:
        os.environ.update(NANODAG_STORE=f"{name}/store")
        asked: dict[str, Any] = {"grid": grid, "points": (), "stage": "", "preset": "pocket", "overrides": ()}
        asked |= {"file": str(PROJECT / "pipeline.yaml"), "flow_run": ""}
        with timed("first: begin"):
            sweep, run = begin_sweep("first", **asked)
        with timed("first: publish"):
            publish_all(run, Path(name))
        run.close()
        with timed("unchanged: begin"):
            sweep, run = begin_sweep("second", **asked)
        with timed("unchanged: keys, look-ups"):
            found = find_built(run)
        with timed("unchanged: record closed"):
            run.close()
        print(f"{len(sweep.points)} points, {len(found)} of {len(run.to_do)} stages found")


if __name__ == "__main__":
    main()
