"""A store with runs, models and evals that nobody trained: what a night sees, without processes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanodag.config import Pipeline
from nanodag.store import Artifact, Store, stage_key
from nanodag.store.run_record import NightRecord, NightScore, RunRecord
from tests.run_records import built, run_record, stage_record
from tests.store import making

EVAL = {"kind": "eval", "inputs": {"model": "sft"}, "benchmarks": [{"name": "sort", "source": "file:x.txt"}]}
STAGES = {"sft": {"kind": "import", "model": "file:/x"}, "eval_sft": EVAL}
ABOUT = {"metric": "exact_match", "higher_is_better": True, "form": "sort", "chat": True, "num_fewshot": 0}


def publish(store: Store, folder: Path, name: str, kind: str, files: dict[str, str]) -> Artifact:
    """Put text files into the store as a stage's result."""
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    key = stage_key(kind=kind, code_version=1, config={"name": name}, inputs={})
    return making.publish(store, folder, key, kind=kind, stage=kind)


def publish_eval(store: Store, folder: Path, name: str, answers: list[int], **about: Any) -> NightScore:
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
    artifact = publish(store, folder, name, "eval", files)
    line = {"label": "main", "stage": "sft", "eval": "eval_sft", "benchmark": "sort", "run": name, "was_found": False}
    where = {field: getattr(artifact, field) for field in ("key", "attempt", "digest")}
    return NightScore(**line, **result, **where)


def night_record(
    name: str, scores: Sequence[NightScore], *, due: float = 0.0, night: Mapping[str, Any] | None = None, **fields: Any
) -> RunRecord:
    """What nights_of gives for one night. night: what makes it one, where that matters."""
    nightly = NightRecord(**{"by_schedule": True, "due": due, "scores": tuple(scores), **(night or {})})
    return run_record(name, **{"created": due, "flow_run": name, "nightly": nightly, **fields})


def write_run(store: Store, name: str, *, sft: str = "built", **fields: Any) -> None:
    """A run, newer than those before, with an sft stage and an eval of it."""
    created = 1.0 + len(store.runs())
    artifact = publish(store, store.local.parent / "made" / name, name, "sft", {"model.txt": name})
    stages = {
        "sft": built(artifact, state=sft, ended=created),
        "eval_sft": stage_record("eval", inputs={"model": "sft"}),
    }
    pipeline = Pipeline.model_validate({"preset": "p", "stages": STAGES})
    record = {"created": created, "stages": stages, "pipeline": pipeline.model_dump(mode="json")}
    store.write_run(run_record(name, **record, **fields))
