"""Prefect's own server: what is asked of it, the automation, deployments and forms, flow runs without an end, pools."""

import json
import logging
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
import yaml
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.deployments.runner import EntrypointType
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling, Pending, Running, Scheduled

from flows import serve
from flows.deployments import NAMES, find, offer_runs
from flows.run_stage import run_stage
from flows.speedrun import speedrun
from nanodag.errors import StageStopped
from nanodag.host.folders import PROJECT
from nanodag.server.local_server import HEARTBEAT_S
from nanodag.server.prefect_api import Api
from nanodag.store import Store
from tasks import pool
from tasks.stage_task import settle
from tests.flow.tiny_runs import opened
from tests.run_records import stage_record

pytestmark = pytest.mark.usefixtures("prefect_server", "project")


@flow
def waits():
    pass


@task
def sends():
    pass


@pytest.fixture
def client():
    with get_client(sync_client=True) as made:
        yield made


def test_a_run_that_waits_to_be_taken_is_active_and_one_of_a_night_to_come_or_for_a_pools_worker_is_not(client):
    api = Api(PREFECT_API_URL.value().removesuffix("/api"))
    before = api.num_active_runs()
    tomorrow = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(days=1))
    found = [client.create_flow_run(waits, state=state) for state in (tomorrow, Scheduled())]
    assert api.num_active_runs() == before + 1
    sender = client.create_task_run(sends, found[0].id, dynamic_key="0")
    found.append(client.create_flow_run(waits, state=Scheduled(), parent_task_run_id=sender.id))
    assert api.num_active_runs() == before + 1
    for run in found:
        client.delete_flow_run(run.id)


def test_the_automation_is_registered_once_however_often_the_serving_process_starts(client, monkeypatch):
    changed = []
    monkeypatch.setattr(client, "update_automation", lambda *given: changed.append(given))
    for _ in range(2):
        serve.watch_runs(client)
    found = client.read_automations_by_name(serve.WATCH)
    assert changed == [], "a change has the server forget whose heartbeats it waits for"
    monkeypatch.setattr(serve, "WITHIN", timedelta(seconds=60))
    serve.watch_runs(client)
    assert [automation.trigger.within for _, automation in changed] == [timedelta(seconds=60)]
    assert len(found) == 1 and found[0].enabled
    assert found[0].trigger.within == timedelta(seconds=90)
    assert found[0].trigger.after >= {"prefect.flow-run.Running"}, "one that died before its first heartbeat stayed"
    assert [action.state.value for action in found[0].actions] == ["CRASHED"]
    assert 3 * HEARTBEAT_S <= 90 <= 120 - HEARTBEAT_S, "two may be lost; one may be to come before the window opens"


def offered(client):
    fields = find(client, "run_stage").parameter_openapi_schema["properties"]
    return fields["name"].get("enum"), fields["stage"].get("enum")


def test_the_form_offers_each_run_as_soon_as_it_has_begun_and_the_stages_of_all(project, client):
    store = Store(project / "store")
    if (left := find(client, "run_stage")) is not None:
        client.delete_deployment(left.id)
    offer_runs(store)  # a run goes on without a form
    how = {"entrypoint_type": EntrypointType.MODULE_PATH, "enforce_parameter_schema": False}
    run_stage.to_deployment(NAMES["run_stage"], **how).apply()
    offer_runs(store)
    stages = ["eval_base", "eval_sft", "pretrain", "report", "sft", "tokenizer"]  # as the pipeline file has them
    assert offered(client) == (None, stages), "no run yet: any name may be written"
    for name in ("first", "second"):
        assert speedrun(name, preset="tiny", return_state=True).is_completed()
    assert offered(client) == (["second", "first"], stages)
    store.change_run("first", lambda record: record.changed(sweep={"stage": "sft", "points": []}))
    store.change_run("second", lambda record: record.changed(stages={**record.stages, "rl": stage_record("rl")}))
    offer_runs(store)
    assert offered(client) == (["second"], [*stages, "rl"])


@pytest.fixture
def deployment():
    return UUID(str(speedrun.to_deployment("local", entrypoint_type=EntrypointType.MODULE_PATH).apply()))


def in_state(client, deployment, state):
    run = client.create_flow_run_from_deployment(deployment, parameters={"name": "x"})
    client.set_flow_run_state(run.id, Running(), force=True)  # from Scheduled, Prefect makes Cancelled of Cancelling
    client.set_flow_run_state(run.id, state, force=True)
    assert client.read_flow_run(run.id).state.type == state.type
    return run.id


def test_what_was_to_start_or_end_when_the_serving_process_was_killed_gets_an_end(client, deployment):
    runs = [in_state(client, deployment, state) for state in (Pending(name="Submitting"), Cancelling(), Running())]
    serve.end_orphans(client, [deployment])
    ends = [client.read_flow_run(run).state.type.value for run in runs]
    assert ends == ["CRASHED", "CANCELLED", "RUNNING"]


@pytest.mark.parametrize(
    ("state", "num_done", "end", "recorded"),
    [
        (Cancelling(), 6, "COMPLETED", "completed"),
        (Cancelling(), 1, "CANCELLED", "stopped"),
        (Running(), 0, "RUNNING", "stopped"),  # nobody cancelled it
    ],
)
def test_a_cancel_in_the_last_second_ends_as_the_record_says(client, deployment, state, num_done, end, recorded):
    flow_run = in_state(client, deployment, state)
    run = opened(flow_run=str(flow_run))
    for stage in run.order[:num_done]:
        run.note(stage, state="built")
    run.close()
    settle(run.flow_run, run)
    assert client.read_flow_run(flow_run).state.type.value == end
    assert run.store.read_run("r").state == recorded


def test_a_stage_sent_to_kubernetes_says_what_it_needs_and_how_often_it_is_heard_of(project, client, monkeypatch):
    template = json.loads((PROJECT / "docs/templates/kubernetes-job.json").read_text())
    client.create_work_pool(WorkPoolCreate(name="k8s", type="kubernetes", base_job_template=template))
    file = project / "pipeline.yaml"
    content = yaml.safe_load(file.read_text())
    resources = {"work_pool": "k8s", "device": "cuda", "num_ranks": 4, "threads": 3}
    content["presets"]["tiny"]["stages"]["pretrain"]["resources"] = resources
    content["server"] = {"database": "postgresql+asyncpg://nobody@nowhere/none"}
    file.write_text(yaml.safe_dump(content))
    run = opened()
    run.stop.set()
    monkeypatch.setattr(pool, "CANCEL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(pool, "get_run_logger", lambda: logging.getLogger("run"))
    with pytest.raises(StageStopped):
        pool.build_in_pool("pretrain", run, {}, force=False)
    sent = [found for found in client.read_flow_runs() if found.name == "r-pretrain"]
    (variables,) = (found.job_variables for found in sent)
    memory = variables.pop("memory")
    of_template = template["variables"]["properties"]["env"].get("default") or {}
    assert variables.pop("env") == {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30", **of_template}
    assert variables == {"gpus": 4, "cpus": 12}
    assert memory.endswith("Mi") and int(memory[:-2]) > 4 * 1024, "what the plan says that four ranks take"
