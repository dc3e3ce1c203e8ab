"""What the report lists of a run, read from its record and the store: the context of a report's job."""

from collections.abc import Callable, Iterable
from typing import Any

from nanodag.store import Artifact, Store
from nanodag.store.run_record import RunRecord

_REPORTED = (
    *("kind", "key", "attempt", "digest", "metrics", "cost"),
    *("config", "sources", "environment", "created"),
)


def context_stages(
    store: Store, record: RunRecord, stages: Iterable[str], *, is_read: Callable[[Artifact], bool]
) -> dict[str, Any]:
    """The finished ones of these stages, as nanodag.report lists them: manifest, files, records.

    stages: in the DAG's order. is_read: whether a stage's files and records are wanted too; the others have none.
    """
    shown: dict[str, Any] = {}
    for stage in stages:
        entry = record.stages[stage]
        if entry.artifact is None:
            continue
        artifact = store.attempt(*entry.artifact)
        # Another run may have built this artifact under other stage names; here it is called as in this run. What it
        # was made of may be the run's no more: then it is what the manifest says.
        lineage = {
            label: {"stage": source, **{f: shown[source][f] for f in ("kind", "key", "attempt", "digest")}}
            if shown[source]["digest"] == artifact.lineage.get(label, {}).get("digest")
            else artifact.lineage[label]
            for label, source in entry.inputs.items()
            if source in shown and label in artifact.lineage
        }
        folders = {"files": "", "records": ""}
        if is_read(artifact):
            folders = {"files": str(store.materialize(artifact)), "records": str(store.records(artifact))}
        shown[stage] = {**{field: getattr(artifact, field) for field in _REPORTED}, "lineage": lineage, **folders}
    return shown
