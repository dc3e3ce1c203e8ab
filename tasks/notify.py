"""Telling somebody that a flow run failed, by what `notify.webhook` names: hooks of every flow, and a trial."""

import json
import sys
from typing import Any

import prefect.blocks.notifications  # noqa: F401 - its kinds of blocks are then known by name
import tenacity
from prefect.blocks.core import Block
from prefect.client.schemas.objects import FlowRun
from prefect.flows import Flow
from prefect.logging.loggers import flow_run_logger
from prefect.settings import PREFECT_UI_URL
from prefect.states import State

from nanodag.config import resolve
from nanodag.errors import NanodagError, ServerBusy
from nanodag.run.notifications import notice, post
from nanodag.run.record import pipeline_file, served_store

PAUSES_S = (5.0, 15.0)  # before another try


def tell(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """A hook: send what a flow run ended with to its pipeline's webhook. Whatever keeps it from that is logged; how
    the run ended stays as it is."""
    try:
        run, webhook = _recorded(flow_run)
        if webhook == "none":
            return
        ui = PREFECT_UI_URL.value()
        look = f"{ui}/runs/flow-run/{flow_run.id}" if ui else ""
        send(webhook, notice(flow=flow.name, run=run, state=state.name or "", message=state.message or "", look=look))
    # Of a block it may be anything. The error's own text may hold the address.
    except Exception as error:  # noqa: BLE001
        reason = str(error) if isinstance(error, NanodagError) else type(error).__name__
        flow_run_logger(flow_run, flow).error("Nobody was told that this run failed: %s", reason)


def send(webhook: str, body: dict[str, str]) -> None:
    """webhook: as in the config, not `none`. Tried again where that may help.

    Raises as `post`; what a block raises for a name that there is not, or for a service that refuses.
    """
    again = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(ServerBusy),
        stop=tenacity.stop_after_attempt(len(PAUSES_S) + 1),
        wait=tenacity.wait_chain(*map(tenacity.wait_fixed, PAUSES_S)),
        reraise=True,
    )
    if webhook.startswith("block:"):
        block: Any = Block.load(webhook.removeprefix("block:"), _sync=True)
        block.notify(body["text"], f"nanodag {body['run']}", _sync=True)
    else:
        again(post, webhook, body)


def _recorded(flow_run: FlowRun) -> tuple[str, str]:
    """The run's name and its webhook: of its record; of the pipeline that was asked for where it has none yet."""
    parameters = flow_run.parameters or {}
    name = str(parameters.get("name") or flow_run.name)
    records = served_store().records_of_runs()
    own = [run for run, record in records.items() if record.flow_run == str(flow_run.id)]
    for run in (*own, name):
        if run in records:
            return run, str(records[run].pipeline["notify"]["webhook"])
    arguments = (parameters.get("preset") or "auto", parameters.get("overrides") or ())
    return name, resolve(pipeline_file(parameters.get("file") or ""), *arguments).pipeline.notify.webhook


if __name__ == "__main__":  # `nanodag notify` runs it
    send(sys.argv[1], json.loads(sys.argv[2]))
