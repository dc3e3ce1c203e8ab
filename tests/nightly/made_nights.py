"""A store with runs, models and evals that nobody trained: what a night sees, without processes."""

import json
from pathlib import Path
from typing import Any

from nanodag.config import Pipeline
from nanodag.store import Store, stage_key

EVAL = {"kind": "eval", "inputs": {"model": "sft"}, "benchmarks": [{"name": "sort", "source": "file:x.txt"}]}
ABOUT = {"metric": "exact_match", "higher_is_better": True, "form": "sort", "chat": True, "num_fewshot": 0}
FACTS: dict[str, Any] = {"config": {}, "lineage": {}, "sources": {}, "metrics": {}, "cost": {}, "environment": {}}


def publish(store: Store, folder: Path, name: str, kind: str, files: dict[str, str]) -> dict[str, Any]:
    """Put text files into the store as a stage's result; returns what a run's record says of it."""
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    key = stage_key(kind=kind, code_version=1, config={"name": name}, inputs={}, sources={})
    artifact = store.publish(key, folder, kind=kind, stage=kind, **FACTS)
    return {"kind": kind, "key": key, "attempt": artifact.attempt, "digest": artifact.digest, "state": "built"}


def publish_eval(store: Store, folder: Path, name: str, answers: list[int], **about: Any) -> dict[str, Any]:
    """An eval's artifact with these answers to items 0, 1, 2 ..., and the score that a night has of it."""
    said = {**ABOUT, **about}
    lines = [json.dumps({"id": f"item-{i}", "scores": {said["metric"]: float(a)}}) for i, a in enumerate(answers)]
    value = sum(answers) / len(answers)
    result = {**said, "value": value, "stderr": 0.01, "low": value - 0.02, "high": value + 0.02}
    result["num_items"] = len(answers)
    files = {
        "results.json": json.dumps({"benchmarks": {"sort": result}, "samples": []}),
        "samples/sort.jsonl": "".join(line + "\n" for line in lines),
    }
    entry = publish(store, folder, name, "eval", files)
    line = {"label": "main", "stage": "sft", "eval": "eval_sft", "benchmark": "sort", "run": name, "was_found": False}
    return {**line, **result, **{field: entry[field] for field in ("key", "attempt", "digest")}}


def night_record(name: str, scores: list[dict[str, Any]], *, due: float = 0.0, **fields: Any) -> dict[str, Any]:
    """What nights_of gives for one night."""
    nightly = {"by_schedule": True, "due": due, "missing": [], "scores": scores}
    return {"run": name, "created": due, "state": "completed", "flow_run": name, "pid": 0, "nightly": nightly} | fields


def write_run(store: Store, folder: Path, name: str, *, created: float, sft: str = "built", **fields: Any) -> None:
    """A run with an sft stage and an eval of it."""
    entry = publish(store, folder / name, name, "sft", {"model.txt": name})
    stages = {
        "sft": {**entry, "state": sft, "inputs": {}, "ended": created},
        "eval_sft": {"kind": "eval", "inputs": {"model": "sft"}, "state": "waiting"},
    }
    pipeline = Pipeline.model_validate(
        {"preset": "p", "stages": {"sft": {"kind": "import", "model": "file:/x"}, "eval_sft": EVAL}}
    )
    record = {"run": name, "created": created, "state": "completed", "flow_run": "", "order": list(stages)}
    store.write_run(name, {**record, "stages": stages, "pipeline": pipeline.model_dump(mode="json"), **fields})
