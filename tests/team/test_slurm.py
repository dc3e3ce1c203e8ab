"""`nanodag slurm` on a Slurm of three nodes: one command, a whole pipeline, its time limit in the midst of RL."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.fault.processes import wait_until
from tests.flow.reduced import reduced_stages
from tests.team.slurm import slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STEPS = 40
THREE = "3xcpu:2:avx2:16GiB"
NANODAG = str(Path(sys.executable).with_name("nanodag"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def write_pipeline(folder):
    """Tokenizer, pretraining on three ranks, RL on two. A folder of its own is its store."""
    shipped = reduced_stages("pocket")
    stages = {name: shipped[name] for name in ("tokenizer", "pretrain", "rl")}
    stages["pretrain"] |= {"resources": {"num_ranks": 3, "threads": 1}, "batch_tokens": 768}
    stages["rl"] |= {"resources": {"num_ranks": 2, "threads": 1}, "inputs": {"model": "pretrain"}}
    stages["rl"] |= {"num_steps": NUM_STEPS, "checkpoint_every": 4}
    for derived in ("placement", "lends_states"):
        del stages["rl"][derived]
    stages["rl"]["sampler"] = {"context": 192, "max_batch": 8, "precision": "fp32"}
    stages["rl"]["rollout"]["filters"] = []  # of a model that knows nothing no answer is right
    preset = {"stages": stages, "tracking": {"trackers": []}}
    folder.mkdir()
    (folder / "pipeline.yaml").write_text(yaml.safe_dump({"default": "tiny", "presets": {"tiny": preset}}))
    return folder


def environment_in(folder):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "NANODAG_"))}
    return kept | {"NANODAG_CACHE": str(folder / "cache")}


def record_in(folder, run):
    path = folder / "store" / "runs" / f"{run}.json"
    return json.loads(path.read_text()) if path.exists() else {"state": "none", "stages": {}}


def steps_of(folder, run):
    """Steps of RL that its metrics tell of."""
    workspace = record_in(folder, run)["stages"].get("rl", {}).get("workspace", "") or "none"
    path = folder / "store" / "work" / workspace.rpartition("/")[2] / "metrics.jsonl"
    return len(re.findall(r'"event": "step"', path.read_text())) if path.exists() else 0


@contextmanager
def run_on_one_node(folder):
    """The same pipeline, as a process of this machine."""
    write_pipeline(folder)
    how = {"cwd": folder, "env": environment_in(folder), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen([NANODAG, "run", "--name", "mine"], text=True, **how)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        subprocess.run([NANODAG, "server", "stop"], check=False, **how)


def test_a_pipeline_of_one_command_goes_on_after_its_time_limit_and_ends_on_the_bytes_of_one_node(cluster, tmp_path):
    folder = write_pipeline(tmp_path / "shared")
    command = cluster.on("n1", [NANODAG, "slurm", "--on", THREE, "--name", "mine", "--time", "30"])
    environment = cluster.environment | environment_in(folder)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    job = re.match(r"Job (\d+) runs mine", done.stdout)[1]
    log = folder / "nanodag-mine.log"

    def told():
        return f"{cluster.job(job)}\n{log.read_text()[-6000:] if log.exists() else ''}\n{cluster.log()}"

    def reached(condition, timeout_s):
        try:
            return wait_until(condition, timeout_s, every_s=0.2)
        except AssertionError:
            raise AssertionError(told()) from None

    reached(lambda: steps_of(folder, "mine") >= 2 or cluster.job(job)["JobState"] not in ("PENDING", "RUNNING"), 600)
    assert cluster.job(job)["JobState"] == "RUNNING", told()
    found = cluster.programs()
    assert {"nanodag.rl", "nanodag.train.torchrun"} < found["n1"] and "nanodag.train.torchrun" in found["n2"], found
    assert [name for name, programs in found.items() if "nanodag.sampler" in programs] == ["n3"], found
    cluster.said("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@180 has it sent
    reached(lambda: cluster.job(job)["JobState"] == "PENDING", 150)
    cluster.said("scontrol", "update", f"JobId={job}", "StartTime=now+5")  # Slurm waits for two minutes
    first = record_in(folder, "mine")
    assert first["state"] == "stopped" and 2 <= steps_of(folder, "mine") < NUM_STEPS, told()
    with run_on_one_node(tmp_path / "alone") as alone:
        reached(lambda: cluster.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), 900)
        assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("COMPLETED", "1"), told()
        record = record_in(folder, "mine")
        assert record["state"] == "completed" and record["stages"]["rl"]["made"]["cost"]["num_attempts"] == 2
        assert record["stages"]["pretrain"]["state"] == "found" and record["host"] == "n1"
        wait_until(cluster.is_idle, 60)
        said, _ = alone.communicate(timeout=900)
        assert alone.returncode == 0, said
    records = [record, record_in(tmp_path / "alone", "mine")]
    digests = [{name: stage["made"]["digest"] for name, stage in each["stages"].items()} for each in records]
    assert digests[0] == digests[1]


def test_a_job_that_is_cancelled_leaves_the_queue_and_its_nodes(cluster, tmp_path):
    folder = write_pipeline(tmp_path / "shared")
    command = cluster.on("n1", [NANODAG, "slurm", "--on", "2xcpu:2:avx2:16GiB", "--name", "gone"])
    environment = cluster.environment | environment_in(folder)
    said = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
    job = re.match(r"Job (\d+) runs gone", said)[1]
    wait_until(lambda: record_in(folder, "gone")["state"] == "running", 400, every_s=0.2)
    cluster.said("scancel", job)
    wait_until(lambda: cluster.job(job)["JobState"] == "CANCELLED", 100, every_s=0.2)
    wait_until(cluster.is_idle, 100)
    assert cluster.job(job)["JobState"] == "CANCELLED" and cluster.job(job)["Restarts"] == "0"
