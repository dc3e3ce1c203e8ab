"""Stages that stand on results that are not their run's any more: after one of its stages was built again alone.

A finished stage notes in the run's record what it was made of. It is stale once one of these is another one by now, its
own config is, or what it was made of is stale itself. Its artifact stays what it is, and what it was made of can be
looked up in its manifest; only, it is no longer what this run's stages give.
"""

import hashlib
from collections.abc import Mapping

from pydantic import BaseModel

from nanodag.config import Pipeline, order_of, result_config
from nanodag.store import Store, canonical_json
from nanodag.store.run_record import Made, RunRecord, StageRecord


def stale_stages(record: RunRecord) -> dict[str, str]:
    """Stages of a run's record that are finished and stale -> why, in the DAG's order.

    Equal bytes are equal: a stage that was built again and came out the same makes nothing stale.
    """
    reasons: dict[str, str] = {}
    for name, entry in record.stages.items():
        if entry.has_ended_well and entry.made is not None and (why := _why(record, entry, entry.made, reasons)):
            reasons[name] = why
    return reasons


def _why(record: RunRecord, entry: StageRecord, made: Made, stale: Mapping[str, str]) -> str:
    """Reason for which a finished stage is stale; empty when it is not. stale: those before it."""
    if made.config != entry.config:
        return "its config is another one now"
    for label, source in entry.inputs.items():
        above = record.stages.get(source)  # none for a night's model: that is a stage of another run
        if above is not None and (above.made is None or above.made.digest != made.inputs.get(label, "")):
            return f"{source} {'was built since' if above.has_ended_well else 'is ' + above.state}"
    return next((f"{source} is stale" for source in entry.inputs.values() if source in stale), "")


def left_alone(record: RunRecord, pipeline: Pipeline) -> dict[str, str]:
    """Stale stages that a run that is resumed leaves as they are, unless it is told otherwise, with why.

    Not among them is what must be run in any case: a stage that is not finished, or has another config in this
    pipeline than it was built with, and all that follows it.
    """
    stale = stale_stages(record)
    inputs = {name: pipeline.stages[name].inputs for name in order_of(pipeline)}
    for name, stage in pipeline.stages.items() if stale else ():
        entry = record.stages.get(name)
        made = entry.made if entry is not None and entry.has_ended_well else None
        if made is None or made.config != config_digest(stage):
            stale = {n: why for n, why in stale.items() if n not in following(inputs, name)}
    return {name: why for name, why in stale.items() if name in pipeline.stages}


def following(inputs: Mapping[str, Mapping[str, str]], first: str) -> tuple[str, ...]:
    """A stage and all that take its result, directly or through others, in the DAG's order.

    inputs: stage -> its inputs, in that order.
    """
    stages = [first]
    for stage, sources in inputs.items():
        if stage not in stages and set(sources.values()) & set(stages):
            stages.append(stage)
    return tuple(stages)


def config_digest(stage: BaseModel) -> str:
    """Digest of a stage's config: 16 hex digits over the part that changes its result."""
    return hashlib.sha256(canonical_json(result_config(stage)).encode()).hexdigest()[:16]


def made_stages(pipeline: Pipeline, store: Store) -> dict[str, str]:
    """Stages that the store has by the records of its runs -> the newest run with one: of the same config, made from
    the same inputs. Whether data or code have changed since is seen when a run starts."""
    known = {}
    for run, record in store.records_of_runs().items():
        for entry in record.stages.values():
            if entry.made is not None and entry.has_ended_well:
                known[entry.made.config, *sorted(entry.made.inputs.items())] = run, entry.key, entry.made.digest
    digests: dict[str, str] = {}
    runs: dict[str, str] = {}
    for name in order_of(pipeline):
        stage = pipeline.stages[name]
        inputs = {label: digests.get(source, "") for label, source in stage.inputs.items()}
        run, key, digest = known.get((config_digest(stage), *sorted(inputs.items())), ("", "", ""))
        if key and store.lookup(key) is not None:
            digests[name], runs[name] = digest, run
    return runs


def advice(run: str) -> str:
    return f"nanodag rerun {run} --stale"
