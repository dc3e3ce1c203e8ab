"""Retry, Run stage and Cancel, clicked in a browser, and what they leave in the store."""

import time

import psutil
import pytest

from nanodag.server.prefect_api import Api
from tests.fault.processes import alive, pids_in, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def wait_for_retry(project, before):
    """The record of a run once it was executed again."""
    run = before["run"]
    wait_until(
        lambda: project.record(run)["started"] > before["started"] and project.record(run)["state"] != "running",
        timeout_s=400,
        every_s=0.1,
    )
    return project.record(run)


def retried(project, page, before):
    """Click Retry on a run's page; its record once that has completed."""
    page.choose("Retry")
    page.shoot("dialog")
    page.confirm("Retry")
    page.shoot("asked")
    record = wait_for_retry(project, before)
    page.wait_for_state("Completed")
    page.shoot("completed")
    assert record["stages"]["pretrain"]["made"]["cost"]["num_attempts"] == 2
    return record


def states(record):
    return {name: stage["state"] for name, stage in record["stages"].items()}


def steps(project, record, stage):
    """The steps in the metrics that a finished stage left in the store."""
    entry = record["stages"][stage]
    path = (
        project.folder / "store" / "artifacts" / entry["key"] / entry["made"]["attempt"] / "records" / "metrics.jsonl"
    )
    return [line.partition('"step": ')[2].partition(",")[0] for line in path.read_text().splitlines()]


def test_retry_finds_what_is_finished_and_goes_on_with_what_failed(project, ui):
    project.tell("pretrain", "fail-late")
    code, output = project.run("run", "tokenizer.seed=1", "--name", "failing")
    assert code == 1, output
    failed = project.record("failing")
    page = ui()
    page.open_run(failed["flow_run"])
    page.wait_for_state("Failed")
    page.wait_for_text("Stage pretrain failed: ValueError: pretrain was told to fail", "What to do: ")
    page.shoot("failed")
    assert page.tasks() == [("pretrain", "Failed"), ("tokenizer", "Completed")]
    project.tell("pretrain", "")
    record = retried(project, page, failed)
    page.open_run(failed["flow_run"])
    tasks = page.tasks()
    page.shoot("completed")
    print(tasks)
    assert states(record) == {"tokenizer": "found", "pretrain": "built", "eval_base": "built", "report": "built"}
    assert steps(project, record, "pretrain") == ["1", "2", "3", "4"], "each step once: it went on from step 2"
    assert ("tokenizer", "Cached") in tasks and ("pretrain", "Completed") in tasks


def test_run_stage_takes_run_stage_overrides_and_force_from_its_form(project, ui):
    code, output = project.run("run", "--name", "whole")
    assert code == 0, output
    before = project.record("whole")
    page = ui()
    page.open_form(project.server()["deployments"]["run_stage"])
    page.click("//button[@aria-label='Select name']")
    page.click("//*[@role='option' and normalize-space(.)='whole']")
    page.click("//button[@aria-label='Select stage']")
    page.shoot("stages")
    page.click("//*[@role='option' and normalize-space(.)='pretrain']")
    page.click(f"{page.field('overrides')}//button[normalize-space(.)='Add item']")
    page.fill(f"{page.field('overrides')}//textarea", "pretrain.seed=7")
    page.click(f"{page.field('force')}//button[@role='switch']")
    page.shoot("filled")
    page.click("//button[@type='submit' and normalize-space(.)='Submit']")
    time.sleep(1.0)
    page.shoot("submitted")
    record = wait_for_retry(project, before)
    page.open_run(record["flow_run"])
    page.wait_for_state("Completed")
    page.shoot("completed")
    assert record["overrides"][-1] == "pretrain.seed=7"
    changed = {name for name in record["stages"] if record["stages"][name] != before["stages"][name]}
    assert changed == {"pretrain"}
    assert record["stages"]["pretrain"]["key"] != before["stages"]["pretrain"]["key"]
    assert record["stages"]["pretrain"]["forced"][0] == record["flow_run"]


@pytest.mark.parametrize("order", ["wait", "hold"])
def test_cancel_leaves_no_process_and_retry_goes_on(project, ui, order):
    """wait: the worker leaves a checkpoint when told to end; hold: it is deaf to that and has to be killed."""
    project.tell("pretrain", order)
    values = [f"pretrain.seed={len(order) + ord(order[0])}", "pretrain.stop_timeout_s=10"]
    code, output = project.run("run", *values, "--name", order, "--detach")
    assert code == 0, output
    workspace = project.wait_for_step(order, "pretrain", 2)
    running = project.record(order)
    page = ui()
    page.open_run(running["flow_run"])
    page.wait_for_state("Running")
    page.shoot("running")
    page.choose("Cancel")
    page.shoot("dialog")
    page.confirm("Cancel Flow Run")
    page.wait_for_state("Cancelled", timeout_s=120)
    page.shoot("cancelled")
    wait_until(lambda: not alive([*pids_in(workspace), running["pid"]]))
    project.tell("pretrain", "")
    record = retried(project, page, running)
    assert set(states(record).values()) <= {"built", "found"}
    assert steps(project, record, "pretrain") == ["1", "2", "3", "4"]


def test_a_run_whose_every_process_was_killed_is_marked_crashed_and_retry_goes_on(project, ui):
    project.tell("pretrain", "wait")
    code, output = project.run("run", "pretrain.seed=99", "--name", "dead", "--detach")
    assert code == 0, output
    workspace = project.wait_for_step("dead", "pretrain", 2)
    running = project.record("dead")
    serving = psutil.Process(project.server()["serve"]["pid"]).children()[0]
    flow = psutil.Process(running["pid"])
    serving.suspend()  # else it would see the flow's end
    flow.kill()
    serving.kill()
    killed = time.monotonic()
    wait_until(lambda: not alive(pids_in(workspace)))
    api = Api(f"http://127.0.0.1:{project.server()['port']}")
    page = ui()
    page.open_run(running["flow_run"])
    page.shoot("killed")
    wait_until(lambda: api.run_state(running["flow_run"])["type"] == "CRASHED", timeout_s=120, every_s=0.5)
    print(f"Crashed after {time.monotonic() - killed:.0f} s")
    page.wait_for_state("Crashed")
    page.shoot("crashed")
    project.tell("pretrain", "")
    retried(project, page, running)
