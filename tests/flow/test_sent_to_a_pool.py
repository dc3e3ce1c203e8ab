"""A stage that is sent to a work pool asks for what it needs, in the pool's own variables."""

import json
import logging

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate

from nanodag.errors import StageStopped
from nanodag.host.folders import PROJECT
from nanodag.run.record import open_run
from tasks import pool


def test_a_stage_that_is_sent_to_kubernetes_says_what_it_needs_and_how_often_it_is_heard_of(
    project, prefect_server, monkeypatch
):
    template = json.loads((PROJECT / "docs/templates/kubernetes-job.json").read_text())
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="k8s", type="kubernetes", base_job_template=template))
    file = project / "pipeline.yaml"
    content = yaml.safe_load(file.read_text())
    content["presets"]["tiny"]["stages"]["pretrain"]["resources"] = {
        **{"work_pool": "k8s", "device": "cuda", "num_ranks": 4, "threads": 3}
    }
    content["server"] = {"database": "postgresql+asyncpg://nobody@nowhere/none"}
    file.write_text(yaml.safe_dump(content))
    run = open_run("r", file="", preset="tiny", overrides=[])
    run.stop.set()
    monkeypatch.setattr(pool, "CANCEL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(pool, "get_run_logger", lambda: logging.getLogger("run"))
    with pytest.raises(StageStopped):
        pool.build_in_pool("pretrain", run, {}, force=False)
    with get_client(sync_client=True) as client:
        sent = [found for found in client.read_flow_runs() if found.name == "r-pretrain"]
    (variables,) = (found.job_variables for found in sent)
    memory = variables.pop("memory")
    of_template = template["variables"]["properties"]["env"].get("default") or {}
    assert variables.pop("env") == {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30", **of_template}
    assert variables == {"gpus": 4, "cpus": 12}
    assert memory.endswith("Mi") and int(memory[:-2]) > 4 * 1024, "what the plan says that four ranks take"
