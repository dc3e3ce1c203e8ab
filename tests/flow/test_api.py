"""What is asked of Prefect's own server."""

from datetime import UTC, datetime, timedelta

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL
from prefect.states import Scheduled

from nanodag.server.prefect_api import Api

pytestmark = pytest.mark.usefixtures("prefect_server")


@flow
def waits():
    pass


@task
def sends():
    pass


def test_a_run_that_waits_to_be_taken_is_active_and_one_of_a_night_to_come_or_for_a_worker_of_a_pool_is_not():
    api = Api(PREFECT_API_URL.value().removesuffix("/api"))
    with get_client(sync_client=True) as client:
        before = api.num_active_runs()
        tomorrow = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(days=1))
        found = [client.create_flow_run(waits, state=state) for state in (tomorrow, Scheduled())]
        assert api.num_active_runs() == before + 1
        sender = client.create_task_run(sends, found[0].id, dynamic_key="0")
        found.append(client.create_flow_run(waits, state=Scheduled(), parent_task_run_id=sender.id))
        assert api.num_active_runs() == before + 1
        for run in found:
            client.delete_flow_run(run.id)
