"""A work pool: two workers share one run's stages, and what becomes of the run and of them stays in step."""

import subprocess
import sys

import psutil
import pytest

from nanodag.server.prefect_api import Api
from tests.fault.processes import wait_until
from tests.fault.project import STAGES, Project
from tests.team.postgres import PASSWORD

pytestmark = pytest.mark.slow

POOL = {"device": "cpu", "threads": 1, "num_ranks": 1, "work_pool": "team"}
EVAL = {**STAGES["eval_base"], "resources": POOL}
SHARED = {
    "tokenizer": STAGES["tokenizer"],  # on the flow's machine, as by default
    "pretrain": {**STAGES["pretrain"], "resources": POOL},
    "eval_base": EVAL,
    "eval_too": {**EVAL, "seed": 5},
}


@pytest.fixture(scope="module")
def project(database, tmp_path_factory):
    """A project whose pool has two workers, each for one stage at a time."""
    folder = tmp_path_factory.mktemp("pool") / "project"
    made = Project(folder, stages=SHARED, server={"database": database.url}, PGPASSWORD=PASSWORD)
    code, output = made.run("run", "--name", "early")
    assert code == 1 and "Prefect has no work pool 'team'" in output and "prefect worker start" in output
    made.workers = {name: start_worker(made, name) for name in ("first", "second")}
    logs = [made.folder / f"{name}.log" for name in made.workers]
    wait_until(lambda: all(b"started!" in log.read_bytes() for log in logs), 120, every_s=0.2)
    yield made
    for worker in made.workers.values():
        worker.terminate()
    for worker in made.workers.values():
        try:
            worker.wait(timeout=60)
        except subprocess.TimeoutExpired:  # Prefect's own: nothing is claimed of how it ends
            worker.kill()
            worker.wait()
    made.run("server", "stop")


def start_worker(project, name):
    environment = project.environment() | {
        "PREFECT_API_URL": f"http://127.0.0.1:{project.server()['port']}/api",
        "PREFECT_HOME": str(project.folder / name),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "nanodag",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
    }
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "team", "--type", "process"]
    command += ["--name", name, "--limit", "1"]
    with (project.folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=project.folder, env=environment, stdout=log, stderr=log)


def test_two_workers_share_the_stages_of_one_run(project):
    evals = ("eval_base", "eval_too")
    for stage in evals:
        project.tell(stage, "wait")
    process = project.command("run", "--name", "shared")
    wait_until(lambda: len(workers_of(project.record("shared"), *evals)) == 2, 500, every_s=0.2)
    found = workers_of(project.record("shared"), *evals)
    for stage in evals:
        project.tell(stage, "")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert sorted(found) == ["first", "second"]
    stages = project.record("shared")["stages"]
    assert {stage["state"] for stage in stages.values()} == {"built", "found"}
    assert workers_of({"stages": stages}, "tokenizer") == [] and len(workers_of({"stages": stages}, "pretrain")) == 1


def stage_of(project, run):
    return project.record(run)["stages"].get("pretrain", {})


def workers_of(record, *stages):
    entries = [record["stages"].get(stage, {}) for stage in stages]
    return [entry["worker"] for entry in entries if entry.get("worker")]


def test_what_is_in_the_store_is_sent_to_no_worker(project):
    assert "4 of them found in the store" in project.done("run", "--name", "again")
    assert workers_of(project.record("again"), "pretrain", "eval_base", "eval_too") == []


def test_a_stage_that_fails_on_a_worker_fails_the_run_with_its_reason(project):
    project.tell("pretrain", "fail")
    code, output = project.run("run", "--name", "bad", "pretrain.seed=11")
    project.tell("pretrain", "")
    assert code == 1
    assert "ValueError: pretrain was told to fail" in output, output
    assert project.record("bad")["stages"]["pretrain"]["state"] == "failed"


def test_cancelling_the_run_ends_its_stage_on_the_worker(project):
    project.tell("pretrain", "wait")
    process = project.command("run", "--name", "stopped", "pretrain.seed=12")
    wait_until(lambda: stage_of(project, "stopped").get("state") == "running", 500, every_s=0.2)
    process.terminate()
    output = process.communicate(timeout=300)[0]
    project.tell("pretrain", "")
    assert process.returncode == 130, output
    api = Api(f"http://127.0.0.1:{project.server()['port']}")
    wait_until(lambda: not api.num_active_runs(), 120, every_s=0.2)
    workspace = project.record("stopped")["stages"]["pretrain"]["workspace"]
    left = subprocess.run(["pgrep", "-f", workspace], check=False, capture_output=True, text=True).stdout
    assert left == ""


def test_a_worker_that_is_gone_with_all_that_it_ran_is_replaced_by_another(project):
    """As when its machine loses power. Last: the project has one worker less then."""
    project.tell("pretrain", "wait")
    process = project.command("run", "--name", "orphan", "pretrain.seed=13")
    wait_until(lambda: stage_of(project, "orphan").get("state") == "running", 500, every_s=0.2)
    name = stage_of(project, "orphan")["worker"]
    lost = psutil.Process(project.workers[name].pid)
    for victim in [lost, *lost.children(recursive=True)]:
        victim.kill()
    project.tell("pretrain", "")
    output = process.communicate(timeout=500)[0]
    assert process.returncode == 0, output
    after = project.record("orphan")["stages"]["pretrain"]
    assert after["state"] == "built" and {name, after["worker"]} == {"first", "second"}
