"""What the form of run-stage offers, and the deployments' names."""

import pytest
from prefect.client.orchestration import get_client
from prefect.deployments.runner import EntrypointType

from flows.deployments import NAMES, find, offer_runs
from flows.run_stage import run_stage
from flows.speedrun import speedrun
from nanodag.store import Store
from tests.run_records import stage_record

pytestmark = pytest.mark.usefixtures("prefect_server", "project")


def serve(name):
    made = run_stage.to_deployment(name, entrypoint_type=EntrypointType.MODULE_PATH, enforce_parameter_schema=False)
    return made.apply()


def offered():
    with get_client(sync_client=True) as client:
        fields = find(client, "run_stage").parameter_openapi_schema["properties"]
    return fields["name"].get("enum"), fields["stage"].get("enum")


def test_the_form_offers_each_run_as_soon_as_it_has_begun_and_the_stages_of_all(project):
    serve(NAMES["run_stage"])
    store = Store(project / "store")
    offer_runs(store)
    stages = ["eval_base", "eval_sft", "pretrain", "report", "sft", "tokenizer"]  # as the pipeline file has them
    assert offered() == (None, stages), "no run yet: any name may be written"
    assert speedrun("first", preset="tiny", return_state=True).is_completed()
    assert speedrun("second", preset="tiny", return_state=True).is_completed()
    assert offered() == (["second", "first"], stages)
    store.change_run("first", lambda record: record.changed(sweep={"stage": "sft", "points": []}))
    store.change_run("second", lambda record: record.changed(stages={**record.stages, "rl": stage_record("rl")}))
    offer_runs(store)
    assert offered() == (["second"], [*stages, "rl"])


def test_a_run_goes_on_without_a_form(project):
    with get_client(sync_client=True) as client:
        if (left := find(client, "run_stage")) is not None:
            client.delete_deployment(left.id)
    offer_runs(Store(project / "store"))
