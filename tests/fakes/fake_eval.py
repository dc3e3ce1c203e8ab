"""An eval stage that takes milliseconds: 100 items, of which as many are right as the file `answers.json` in
FAKE_ORDERS says for the seed of the model that it is given; all of them where it says nothing."""

import json
import os
from pathlib import Path

from nanodag.worker.job import MetricsLog, finish, load_job

NUM_ITEMS = 100


def main() -> None:
    job = load_job()
    orders = Path(os.environ["FAKE_ORDERS"])
    if (orders / job.name).exists() and (orders / job.name).read_text().strip() == "fail":
        raise ValueError(f"{job.name} was told to fail")
    seed = json.loads((job.inputs["model"] / "made.json").read_text())["seed"]
    answers = json.loads((orders / "answers.json").read_text()) if (orders / "answers.json").exists() else {}
    num_right = answers.get(str(seed), NUM_ITEMS)
    results = {}
    (job.output / "samples").mkdir(parents=True, exist_ok=True)
    for benchmark in job.config.benchmarks:
        scores = [{"exact_match": float(i < num_right)} for i in range(NUM_ITEMS)]
        lines = [json.dumps({"id": f"{i}", "scores": score}) + "\n" for i, score in enumerate(scores)]
        (job.output / "samples" / f"{benchmark.name}.jsonl").write_text("".join(lines))
        value = num_right / NUM_ITEMS
        results[benchmark.name] = {
            **{"metric": "exact_match", "higher_is_better": True, "form": "x", "chat": True, "num_fewshot": 0},
            **{"value": value, "stderr": 0.01, "low": value - 0.02, "high": value + 0.02, "num_items": NUM_ITEMS},
        }
    (job.output / "results.json").write_text(json.dumps({"benchmarks": results, "samples": []}))
    log = MetricsLog(job)
    log.write(1, total=1)
    log.close()
    finish(job, metrics={name: result["value"] for name, result in results.items()}, cost={})


if __name__ == "__main__":
    main()
