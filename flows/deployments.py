"""Names of the flows' deployments, and the runs and stages that the form of `run-stage` offers."""

import logging
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound

from nanodag.config.resolve import read_document, stages_in
from nanodag.errors import NanodagError
from nanodag.run.record import pipeline_file
from nanodag.store import Store

log = logging.getLogger(__name__)

NAMES = {
    "speedrun": "run-pipeline",
    "run_stage": "run-stage",
    "sweep": "run-sweep",
    "nightly_eval": "run-nightly-evals",
}
MAX_OFFERED = 200


def find(client: SyncPrefectClient, flow: str) -> DeploymentResponse | None:
    """A flow's deployment; None before it was made."""
    try:
        return client.read_deployment_by_name(f"{flow}/{NAMES[flow]}")
    except ObjectNotFound:
        return None


def offer_runs(store: Store) -> None:
    """Have the form of `run-stage` offer this store's newest runs, and their stages, as boxes to select from.

    Called when serving begins and when a run is added. Neither is enforced: a run that another machine has added may
    be asked for by name. A server or store that does not answer costs the form its newest run, and no more.
    """
    try:
        with get_client(sync_client=True) as client:
            deployment = find(client, "run_stage")
            if deployment is None:
                return
            schema = with_choices(deployment.parameter_openapi_schema or {}, store)
            if schema != deployment.parameter_openapi_schema:
                client.update_deployment(deployment.id, DeploymentUpdate(parameter_openapi_schema=schema))
    except (httpx.HTTPError, NanodagError):
        log.warning("The form of run-stage does not offer the newest run.", exc_info=True)


def with_choices(schema: dict[str, Any], store: Store) -> dict[str, Any]:
    """The schema of run_stage's parameters with this store's runs, the newest first, and their stages."""
    records = {n: r for n, r in store.records_of_runs().items() if not r.composed}
    in_file = stages_in(read_document(pipeline_file("")))
    stages = dict.fromkeys([*in_file, *(stage for record in records.values() for stage in record.stages)])
    choices = {"name": list(reversed(records))[:MAX_OFFERED], "stage": list(stages)}
    properties = {
        name: {**field, "enum": choices[name]} if choices.get(name) else field
        for name, field in schema.get("properties", {}).items()
    }
    return {**schema, "properties": properties}
