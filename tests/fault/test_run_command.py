"""`nanodag run` from outside: its exit codes, what Ctrl-C and SIGKILL leave, and that the same run goes on."""

import os
import signal

import httpx
import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from nanodag.server.prefect_api import Api
from tests.fault.processes import alive, pids_in, wait_until

pytestmark = pytest.mark.timeout(600)


def states(project, run):
    return {name: stage["state"] for name, stage in project.record(run)["stages"].items()}


def test_a_wrong_config_is_refused_before_anything_starts(project):
    code, output = project.run("run", "pretrain.dept=3")
    assert code == 2 and "pretrain.dept: there is no such key" in output
    assert not (project.folder / "store").exists()


def test_a_run_completes_and_the_same_again_builds_nothing(project):
    project.done("run", "--name", "first")
    assert set(states(project, "first").values()) == {"built"}
    assert "4 of them found in the store" in project.done("run", "--name", "second")
    assert set(states(project, "second").values()) == {"found"}
    status = project.done("status")
    assert "first" in status and "completed" in status
    assert "from     tokenizer: tokenizer" in project.done("stages", "sec")


def test_a_failed_stage_is_named_and_a_retry_as_in_the_ui_builds_only_what_failed(project):
    project.tell("eval_base", "fail")
    code, output = project.run("run", "eval_base.seed=1", "--name", "failing")
    project.tell("eval_base", "")
    assert code == 1 and "ValueError: eval_base was told to fail" in output
    assert states(project, "failing")["eval_base"] == "failed"
    flow_run = project.record("failing")["flow_run"]
    api = Api(f"http://127.0.0.1:{project.server()['port']}")
    api.set_state(flow_run, "SCHEDULED", "", name="AwaitingRetry")
    wait_until(lambda: api.run_state(flow_run)["type"] == "COMPLETED", 300, every_s=0.2)
    assert {name for name, s in states(project, "failing").items() if s == "built"} == {"eval_base", "report"}


def test_rerun_builds_a_stage_with_other_values_or_one_and_all_that_follow_it(project):
    project.done("rerun", "sec", "--stage", "pretrain", "pretrain.seed=4")
    after = project.record("second")
    assert {name for name, s in states(project, "second").items() if s == "built"} == {"pretrain"}
    text = (project.folder / "text.txt").read_text()
    (project.folder / "text.txt").write_text("changed\n")  # a run from the beginning would build everything again
    project.done("rerun", "second", "--from", "eval_base", "--force")
    (project.folder / "text.txt").write_text(text)
    built = {name for name, state in states(project, "second").items() if state == "built"}
    assert built == {"eval_base", "pretrain", "report"}
    record = project.record("second")["stages"]
    assert record["pretrain"] == after["stages"]["pretrain"], "what comes before is as the run left it"
    assert record["eval_base"]["key"] != after["stages"]["eval_base"]["key"], "it scores the new model"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--stage", "pretrain", "pretrain.sed=1"), "pretrain.sed: there is no such key"),
        ((), "Say either --stage STAGE"),
    ],
)
def test_a_wrong_rerun_is_refused_before_anything_starts(project, arguments, said):
    code, output = project.run("rerun", "first", *arguments)
    assert code == 2 and said in output


@pytest.mark.slow
def test_a_killed_serving_process_takes_its_flows_along_is_started_again_and_a_retry_goes_on(project):
    project.tell("pretrain", "wait")
    project.done("run", "pretrain.seed=5", "--name", "unserved", "--detach")
    workspace = project.wait_for_step("unserved", "pretrain", 2)
    before = project.record("unserved")
    supervisor = psutil.Process(project.server()["serve"]["pid"])
    supervisor.children()[0].kill()
    api = Api(f"http://127.0.0.1:{project.server()['port']}")
    wait_until(
        lambda: api.run_state(before["flow_run"])["type"] == "CRASHED"
        and not alive([*pids_in(workspace), before["pid"]]),
        300, every_s=0.2,
    )  # fmt: skip
    project.tell("pretrain", "")
    api.set_state(before["flow_run"], "SCHEDULED", "", name="AwaitingRetry")
    wait_until(lambda: api.run_state(before["flow_run"])["type"] == "COMPLETED", 300, every_s=0.2)
    assert supervisor.is_running() and len(supervisor.children()) == 1
    assert project.record("unserved")["stages"]["pretrain"]["made"]["cost"]["num_attempts"] == 2


def press_ctrl_c(project, process, run):
    process.send_signal(signal.SIGINT)


def kill_flow(project, process, run):
    os.kill(project.record(run)["pid"], signal.SIGKILL)


def kill_flow_and_server(project, process, run):
    code, output = project.run("run", "--name", run)
    assert code == 1 and "is under way in process" in output
    server = project.server()
    for pid in (server["serve"]["pid"], server["server"]["pid"], project.record(run)["pid"]):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "end", "code", "state"),
    [
        (1, press_ctrl_c, 130, "stopped"),
        (2, kill_flow, 1, "interrupted"),
        pytest.param(3, kill_flow_and_server, 1, "interrupted", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_ended_leaves_no_worker_and_the_same_run_goes_on(project, number, end, code, state):
    project.tell("pretrain", "wait")
    run = f"ended-{number}"
    process = project.command("run", f"pretrain.seed={number}", "--name", run)
    workspace = project.wait_for_step(run, "pretrain", 2)
    end(project, process, run)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code and f"nanodag run --name {run}" in output
    wait_until(lambda: not alive(pids_in(workspace)), 300)
    assert state in project.run("status", run)[1]
    project.tell("pretrain", "")
    project.done("run", "--name", run)
    assert project.record(run)["stages"]["pretrain"]["made"]["cost"]["num_attempts"] == 2


def test_a_web_page_of_another_origin_or_name_reads_nothing_and_creates_no_run(project):
    """What a browser asks for a page: it shows an answer to no page that the answer does not allow."""
    served = project.server()
    url = f"http://127.0.0.1:{served['port']}"
    create = f"{url}/api/deployments/{served['deployments']['speedrun']}/create_flow_run"
    body = {"parameters": {"name": "attack"}, "state": {"type": "SCHEDULED", "name": "Scheduled"}}
    num_runs = Api(url).ask("POST", "/flow_runs/count", {})
    with httpx.Client(trust_env=False) as browser:
        for page in ({"Origin": "http://evil.example"}, {"Origin": "http://127.0.0.1:1"}, {"Origin": "null"}):
            read = browser.get(f"{url}/api/csrf-token", params={"client": "me"}, headers=page)
            assert "access-control-allow-origin" not in read.headers
            asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "prefect-csrf-token"}
            assert browser.options(create, headers={**page, **asks}).status_code == 400
            assert browser.post(create, json=body, headers=page).status_code == 403, "which needs no leave to be sent"
            with pytest.raises(InvalidStatus):
                connect(f"{url.replace('http', 'ws')}/api/events/out", origin=page["Origin"]).close()
        token = browser.get(f"{url}/api/csrf-token", params={"client": "me"}).json()["token"]
        own = {"Prefect-Csrf-Client": "me", "Prefect-Csrf-Token": token}
        rebound = {"Host": f"rebound.example:{served['port']}", **own}  # the same origin, as a browser sees it
        assert browser.post(create, json=body, headers=rebound).status_code == 400
        assert browser.post(create, json={"parameters": {"nam": 1}}, headers=own).status_code in (409, 422), "allowed"
    assert Api(url).ask("POST", "/flow_runs/count", {}) == num_runs


def test_server_stop_ends_all_that_was_started(project):
    server = project.server()
    pids = [server["serve"]["pid"], server["server"]["pid"]]
    assert project.run("server", "status")[0] == 0
    assert project.run("server", "stop")[0] == 0
    assert not alive(pids)
    assert project.run("server", "status")[0] == 3
