"""The real packages take what nanodag gives them: W&B into offline files, trackio and MLflow into databases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanodag.config.pipeline import read_stage
from nanodag.worker import tracker
from nanodag.worker.job import Job, write_job
from tests.config.stages import STAGES

pytestmark = pytest.mark.slow


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Python's path to them: `pip install --target FOLDER wandb trackio mlflow-skinny`, FOLDER in NANODAG_TRACKERS."""
    folder = os.environ.get("NANODAG_TRACKERS", "")
    if not (Path(folder) / "wandb").is_dir():
        missing = "NANODAG_TRACKERS names no folder with wandb, trackio and mlflow"
        (pytest.fail if os.environ.get("NANODAG_CI") else pytest.skip)(missing)
    monkeypatch.setenv("PYTHONPATH", folder)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def workspace_of(folder, mode, work="work"):
    context = {"preset": "p", "trackers_folder": str(folder / "out"), "tracking": {"mode": mode, "tags": ["a", "b"]}}
    stage = read_stage(STAGES["base"])
    (folder / work).mkdir()
    job = Job(name="base", run="r", config=stage, inputs={}, workspace=folder / work, context=context)
    write_job(job)
    return job.workspace


def track(name, workspace, *steps):
    """One try of a stage that makes these steps; returns what is known of its run."""
    with (workspace / "metrics.jsonl").open("a") as stream:
        lines = ({"event": "step", "step": n, "total": 4, "time": 1.0, "loss": 1 / n} for n in steps)
        stream.writelines(json.dumps(line) + "\n" for line in lines)
    tracker.TrackerProcesses(workspace, [name]).close()
    return json.loads((workspace / "trackers" / f"{name}.json").read_text())


def publish(name, workspace, folder):
    """Have the tracker log a folder as the stage's artifact; returns its address."""
    (folder / "artifact").mkdir()
    (folder / "artifact" / "weights").write_text("1")
    tracker.TrackerProcesses(workspace, [name], (folder / "artifact").as_uri(), "a1b2c3").close()
    return (folder / "artifact").as_uri()


def test_wandb_writes_two_tries_of_a_stage_and_its_artifact_under_one_id(packages, tmp_path, caplog, capfd):
    workspace = workspace_of(tmp_path, "offline")
    first, second = track("wandb", workspace, 1, 2), track("wandb", workspace, 3)
    address = publish("wandb", workspace, tmp_path)
    assert (first["id"], first["step"], second["step"]) == (second["id"], 2, 3) and not caplog.messages
    assert "WARNING" not in capfd.readouterr().err
    run = first["id"]
    files = sorted((tmp_path / "out" / "wandb").glob(f"offline-run-*-{run}/run-{run}.wandb"))
    assert len(files) in (1, 2, 3)  # fewer than three, when two began in the same second
    for word in (b"base/loss", b"nanodag", b"sequence_length", b"r-base", f"{address}/weights".encode(), b"a1b2c3"):
        assert any(word in file.read_bytes() for file in files), word


def test_trackio_has_one_run_of_two_tries_with_its_steps(packages, tmp_path, caplog):
    workspace = workspace_of(tmp_path, "online")
    run = track("trackio", workspace, 1, 2)["id"]
    track("trackio", workspace, 3)
    code = "import trackio; [print('RUN', run.name, run.config['_Group']) for run in trackio.Api().runs('nanodag')]"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    runs = [text.split()[1:] for text in said.splitlines() if text.startswith("RUN ")]
    assert runs == [[run, "r"]] and not caplog.messages
    asked = ["--project", "nanodag", "--run", run, "--metric", "base/loss", "--json"]
    command = [sys.executable, "-m", "trackio.cli", "get", "metric", *asked]
    values = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["values"]
    assert [(value["step"], value["value"]) for value in values] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]


def test_mlflow_has_one_run_of_two_tries_with_its_steps_and_the_rows_of_both(packages, tmp_path, caplog):
    workspace = workspace_of(tmp_path, "online")
    with (workspace / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 0, "pass@4 (a)": 1.0, "responses": [{"prompt": "p", "text": "t"}]}) + "\n")
    first = track("mlflow", workspace, 1, 2)["id"]
    track("mlflow", workspace, 3)
    address = publish("mlflow", workspace, tmp_path)
    code = """
import json, sys, mlflow
from mlflow import MlflowClient
[run] = mlflow.search_runs(search_all_experiments=True, output_format="list")
history = MlflowClient().get_metric_history(run.info.run_id, "base/loss")
table = mlflow.artifacts.load_dict(run.info.artifact_uri + "/base/responses.json")
print("RUN", json.dumps([run.data.tags["nanodag.id"], run.info.run_name, run.info.status,
    [[each.step, each.value] for each in history], table["data"],
    run.data.tags["nanodag.artifact"], run.data.tags["nanodag.digest"]]))
"""
    folder = tmp_path / "out" / "mlflow"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder).stdout
    [found] = [json.loads(line[4:]) for line in said.splitlines() if line.startswith("RUN ")]
    steps = [[1, 1.0], [2, 0.5], [3, pytest.approx(1 / 3)]]
    assert found == [first, "r/base", "FINISHED", steps, [["p", "t", 0]], address, "a1b2c3"] and not caplog.messages


def test_two_stages_that_begin_at_once_have_a_run_of_mlflow_each(packages, tmp_path, caplog):
    workspaces = [workspace_of(tmp_path, "online", name) for name in ("one", "other")]
    for workspace in workspaces:
        (workspace / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}) + "\n")
    processes = [tracker.TrackerProcesses(workspace, ["mlflow"]) for workspace in workspaces]
    for process in processes:
        process.close()
    known = [json.loads((workspace / "trackers" / "mlflow.json").read_text()) for workspace in workspaces]
    assert [state["step"] for state in known] == [1, 1] and known[0]["id"] != known[1]["id"] and not caplog.messages
