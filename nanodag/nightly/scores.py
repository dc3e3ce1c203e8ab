"""The scores of a night, read from the artifacts of its eval stages."""

import json
from collections.abc import Mapping

from nanodag.nightly.nights import Night
from nanodag.run.record import StageResult
from nanodag.store.run_record import NightScore

KEPT = (
    *("metric", "higher_is_better", "form", "chat", "num_fewshot", "sampling"),
    *("value", "stderr", "low", "high", "num_items"),
)


def scores_of(night: Night, results: Mapping[str, StageResult]) -> list[NightScore]:
    """One score a model and benchmark, in the order of the config. results: the night's stage name -> its result;
    stages that failed are not in it."""
    scores = []
    for subject in night.subjects:
        for name, (eval_name, _) in subject.evals.items():
            if name not in results:
                continue
            result = results[name]
            folder = night.run.store.materialize(night.run.store.attempt(result.key, result.attempt))
            benchmarks = json.loads((folder / "results.json").read_text(encoding="utf-8"))["benchmarks"]
            for benchmark, values in benchmarks.items():
                line = {"label": subject.label, "stage": subject.stage, "eval": eval_name, "benchmark": benchmark}
                artifact = {"key": result.key, "attempt": result.attempt, "digest": result.digest}
                kept = {field: values[field] for field in KEPT if field in values}
                scores.append(NightScore(**line, run=subject.run, **kept, **artifact, was_found=result.was_found))
    return scores
