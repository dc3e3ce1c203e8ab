"""Flow runs that nobody would give an end: what was to start or to end them was killed, or looked too late."""

from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.deployments.runner import EntrypointType
from prefect.states import Cancelling, Pending, Running

from flows.serve import end_orphans
from flows.speedrun import speedrun
from nanodag.run.record import open_run
from tasks.stage_task import settle

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def client():
    with get_client(sync_client=True) as made:
        yield made


@pytest.fixture
def deployment():
    return UUID(str(speedrun.to_deployment("local", entrypoint_type=EntrypointType.MODULE_PATH).apply()))


def in_state(client, deployment, state):
    run = client.create_flow_run_from_deployment(deployment, parameters={"name": "x"})
    client.set_flow_run_state(run.id, Running(), force=True)  # from Scheduled, Prefect makes Cancelled of Cancelling
    client.set_flow_run_state(run.id, state, force=True)
    assert client.read_flow_run(run.id).state.type == state.type
    return run.id


def test_what_was_to_start_or_end_when_the_serving_process_was_killed_gets_an_end(project, client, deployment):
    runs = [in_state(client, deployment, state) for state in (Pending(name="Submitting"), Cancelling(), Running())]
    end_orphans(client, [deployment])
    ends = [client.read_flow_run(run).state.type.value for run in runs]
    assert ends == ["CRASHED", "CANCELLED", "RUNNING"]


@pytest.mark.parametrize(("is_done", "end"), [(True, "COMPLETED"), (False, "CANCELLED")])
def test_a_cancel_in_the_last_second_ends_as_the_record_says(project, client, deployment, is_done, end):
    flow_run = in_state(client, deployment, Cancelling())
    run = open_run("r", file="", preset="tiny", overrides=[], flow_run=str(flow_run))
    for stage in run.order if is_done else run.order[:1]:
        run.note(stage, state="built")
    run.close()
    settle(run.flow_run, run)
    assert client.read_flow_run(flow_run).state.type.value == end
    assert run.store.read_run("r")["state"] == ("completed" if is_done else "stopped")


def test_a_run_that_nobody_cancelled_is_left_alone(project, client, deployment):
    flow_run = in_state(client, deployment, Running())
    run = open_run("r", file="", preset="tiny", overrides=[], flow_run=str(flow_run))
    run.close()
    settle(run.flow_run, run)
    assert client.read_flow_run(flow_run).state.type.value == "RUNNING"
