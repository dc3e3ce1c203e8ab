"""Records of runs as the store keeps them, from the few facts that a test is about."""

from typing import Any

from nanodag.store import Artifact
from nanodag.store.run_record import Made, RunRecord, StageRecord

PLAIN: dict[str, Any] = {
    **{"created": 1.0, "started": 1.0, "state": "completed", "file": "/none/pipeline.yaml", "preset": "p"},
    **{"overrides": (), "pipeline": {"stages": {}}, "origins": {}, "machine": "cpu:2:avx2:8GiB", "stages": {}},
    **{"revision": "r", "flow_run": "", "pid": 1, "pid_started": -1.0},
}


def run_record(run: str, **fields: Any) -> RunRecord:
    """A run that has completed, and whose process is gone."""
    return RunRecord(run=run, **{**PLAIN, **fields})


def stage_record(kind: str = "sft", made: dict[str, Any] | None = None, **fields: Any) -> StageRecord:
    """A stage. made: what it was finished with, beside an attempt and a digest that say nothing."""
    given = None if made is None else Made(**{"attempt": "0001", "digest": "d", **made})
    return StageRecord(kind=kind, made=given, **fields)


def built(artifact: Artifact, **fields: Any) -> StageRecord:
    """A stage that has this artifact as its result."""
    made = {"attempt": artifact.attempt, "digest": artifact.digest}
    return stage_record(artifact.kind, made, **{"state": "built", "key": artifact.key, **fields})
