"""What orchestration adds to a stage: `python -m benchmarks.orchestration [--stages 10]`.

A chain of stages that do nothing (tests/fakes) goes through the whole machinery: Prefect server, flow, key, lock,
worker under the watchdog, publishing. Printed for each stage, as medians:
    worker start    from launch to its first line of metrics: Python and imports
    worker work     from there to its end
    in the task     what the task took beside these: key, lookup, inputs verified, publishing
    in Prefect      what the flow took a stage beside its tasks
and what a stage takes that is found.
"""

import argparse
import contextlib
import os
import runpy
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from nanodag.store.run_record import RunRecord

FAKES = Path(__file__).resolve().parent.parent / "tests" / "fakes"


def chain(num_stages: int) -> dict[str, dict]:
    """A pipeline of fine-tunings, each on the one before."""
    common = {"data": ["file:text.txt"], "sequence_length": 8, "batch_tokens": 64}
    stages: dict[str, dict] = {
        "tokenizer": {"kind": "tokenizer", "data": ["file:text.txt"], "vocabulary": 512},
        "s0": {
            **common,
            "kind": "pretrain",
            "inputs": {"tokenizer": "tokenizer"},
            "shape": {"depth": 1},
            "horizon_tokens": 64,
        },
    }
    for number in range(1, num_stages - 1):
        stages[f"s{number}"] = {**common, "kind": "sft", "inputs": {"model": f"s{number - 1}"}}
    return stages


@contextlib.contextmanager
def fake_project(num_stages: int) -> Iterator[Path]:
    """A folder with that pipeline as working directory, its stages run by the fake worker."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("hello\n" * 100)
        (folder / "orders").mkdir()
        presets = {"chain": {"stages": chain(num_stages)}}
        (folder / "pipeline.yaml").write_text(yaml.safe_dump({"default": "chain", "presets": presets}, sort_keys=False))
        os.environ.update(FAKE_ORDERS=str(folder / "orders"), PYTHONPATH=str(FAKES), NANODAG_CACHE=name)
        os.environ.pop("NANODAG_STORE", None)
        os.chdir(folder)
        runpy.run_path(str(FAKES / "sitecustomize.py"))  # puts the fake worker into the kinds
        yield folder
        os.chdir("/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=10)
    num_stages = parser.parse_args().stages
    with fake_project(num_stages) as folder:
        from prefect.testing.utilities import prefect_test_harness

        from flows.speedrun import speedrun
        from nanodag.store import Store

        with prefect_test_harness(server_startup_timeout=120):
            for name in ("warm", "built", "found"):
                overrides = [f"seed={0 if name == 'warm' else 1}"]
                state = speedrun(name, overrides=overrides, return_state=True)
                assert state.is_completed(), state.message
        store = Store(folder / "store")
        report(store.read_run("built"), store.read_run("found"))


def report(built: RunRecord, found: RunRecord) -> None:
    """Print the medians over the stages of a run that built all, and of one that found all."""
    stages = [stage.made for stage in built.stages.values() if stage.made is not None]
    start = statistics.median(made.cost_of("start_s") for made in stages)
    work = statistics.median(made.cost_of("work_s") for made in stages)
    in_task = statistics.median(made.took_s - made.cost_of("start_s") - made.cost_of("work_s") for made in stages)
    in_prefect = (built.ended - built.started - sum(made.took_s for made in stages)) / len(stages)
    found_stage = (found.ended - found.started) / len(stages)
    print(f"worker start {1000 * start:6.0f} ms")
    print(f"worker work  {1000 * work:6.0f} ms")
    print(f"in the task  {1000 * in_task:6.0f} ms")
    print(f"in Prefect   {1000 * in_prefect:6.0f} ms")
    print(f"orchestration a stage {1000 * (in_task + in_prefect):.0f} ms; a found stage {1000 * found_stage:.0f} ms")


if __name__ == "__main__":
    main()
