"""What of a run stands on results that are not the run's any more: after one of its stages was built again alone.

A finished stage notes in the run's record what it was made of. It is stale once one of these is another one by now, its
own config is, or what it was made of is stale itself. Its artifact stays what it is, and what it was made of can be
looked up in its manifest; only, it is no longer what this run's stages give.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from nanodag.config import Pipeline, order_of, result_config
from nanodag.store import canonical_json

ENDED_WELL = ("built", "found")

Record = Mapping[str, Any]


def stale_stages(record: Record) -> dict[str, str]:
    """Stages of a run's record that are finished and stale -> why, in the DAG's order.

    Equal bytes are equal: a stage that was built again and came out the same makes nothing stale. Of stages that were
    finished before records said what they were made of, nothing is known, and nothing is said.
    """
    found: dict[str, str] = {}
    for name in record["order"]:
        entry = record["stages"][name]
        if entry["state"] in ENDED_WELL and "made_of" in entry and (why := _why(record, entry, found)):
            found[name] = why
    return found


def _why(record: Record, entry: Record, stale: Mapping[str, str]) -> str:
    """Why a finished stage is stale; empty when it is not. stale: those before it."""
    if entry["made_with"] != entry.get("config", entry["made_with"]):
        return "its config is another one now"
    for label, source in entry["inputs"].items():
        above, digest = record["stages"].get(source, {}), entry["made_of"].get(label, "")
        if above and digest != above.get("digest", ""):
            return f"{source} {'was built since' if above['state'] in ENDED_WELL else 'is ' + above['state']}"
    return next((f"{source} is stale" for source in entry["inputs"].values() if source in stale), "")


def left_alone(record: Record, pipeline: Pipeline) -> dict[str, str]:
    """What a run that is resumed leaves as it is, unless it is told otherwise: its stale stages, with why.

    Not among them is what must be run in any case: a stage that is not finished, or has another config in this
    pipeline than it was built with, and all that follows it.
    """
    stale = stale_stages(record)
    inputs = {"order": order_of(pipeline), "stages": {n: {"inputs": s.inputs} for n, s in pipeline.stages.items()}}
    for name, stage in pipeline.stages.items() if stale else ():
        entry = record["stages"].get(name, {})
        is_finished = entry.get("state") in ENDED_WELL and "attempt" in entry
        if not is_finished or entry.get("made_with", "") not in ("", config_digest(stage)):
            stale = {n: why for n, why in stale.items() if n not in following(inputs, name)}
    return {name: why for name, why in stale.items() if name in pipeline.stages}


def following(record: Record, first: str) -> tuple[str, ...]:
    """A stage of a run's record and all that take its result, directly or through others, in the DAG's order."""
    found = [first]
    for stage in record["order"]:
        if stage not in found and set(record["stages"][stage]["inputs"].values()) & set(found):
            found.append(stage)
    return tuple(found)


def config_digest(stage: BaseModel) -> str:
    """What a stage's config is told by: 16 hex digits over the part that changes its result."""
    return hashlib.sha256(canonical_json(result_config(stage)).encode()).hexdigest()[:16]


def advice(run: str) -> str:
    """How to build what is stale."""
    return f"nanodag rerun {run} --stale"
