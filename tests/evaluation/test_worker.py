import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanodag.config.kinds.evaluation import EvalStage
from nanodag.evaluation import __main__ as worker
from nanodag.worker.job import write_job
from tests.evaluation.jobs import bytes_of, evaluate


def test_an_eval_stage_leaves_scores_records_and_samples(make_job):
    job = make_job("a")
    metrics, cost = evaluate(job)
    results = json.loads((job.output / "results.json").read_text())
    benchmarks = results["benchmarks"]
    assert metrics == {name: benchmarks[name]["value"] for name in ("words", "bits_per_byte", "continuation")}
    words = benchmarks["words"]
    about = words["metric"], words["form"], words["chat"], words["num_items"]
    assert about == ("exact_match", "problems_chat", True, 5)
    assert words["low"] <= words["value"] <= words["high"]
    records = [json.loads(line) for line in (job.output / "samples" / "words.jsonl").read_text().splitlines()]
    assert sum(record["scores"]["exact_match"] for record in records) / 5 == words["value"]
    assert results["samples"][0]["prompt"] == "the cat" and results["samples"][0]["completion"]
    # 2 layers of 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 parameters, and 280 * 32 of the untied head
    assert cost["flops"] == cost["forward_tokens"] * 2 * (2 * (2 * 1024 + 2 * 512 + 3 * 1536) + 280 * 32)
    lines = [json.loads(line) for line in job.metrics_path.read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert (lines[-1]["step"], lines[-1]["total"]) == (3000, 3000)


def test_killed_and_started_again_it_ends_on_the_same_bytes_without_asking_twice(make_job, monkeypatch):
    whole = make_job("whole")
    evaluate(whole)
    asked = []

    def dies_at_the_second(checkpoint, config, **rest):
        asked.append(config.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return original(checkpoint, config, **rest)

    original = worker.run_benchmark
    monkeypatch.setattr(worker, "run_benchmark", dies_at_the_second)
    broken = make_job("broken")
    with pytest.raises(KeyboardInterrupt):
        evaluate(broken)
    assert not (broken.output / "results.json").exists()
    evaluate(broken)
    assert asked == ["words", "bits_per_byte", "bits_per_byte", "continuation"]
    assert bytes_of(broken) == bytes_of(whole)
    assert len(bytes_of(whole)) == 4


def test_killed_between_items_it_goes_on_behind_them_and_ends_on_the_same_bytes(make_job, monkeypatch):
    """Each kill comes some progress reports later than the last one: within every benchmark, and between them."""
    whole = make_job("whole", micro_batch_tokens=64)
    _, cost = evaluate(whole)
    broken, kills = make_job("broken", micro_batch_tokens=64), 0
    report = worker._Progress.__call__
    with monkeypatch.context() as patch:
        for most in range(2, 60, 2):
            seen = []

            def dies(progress, done, total, seen=seen, most=most):
                seen.append(done)
                if len(seen) > most:
                    raise KeyboardInterrupt
                report(progress, done, total)

            patch.setattr(worker._Progress, "__call__", dies)
            try:
                _, found = evaluate(broken)
                break
            except KeyboardInterrupt:
                kills += 1
                assert not (broken.output / "results.json").exists()
    assert kills >= 3
    assert bytes_of(broken) == bytes_of(whole)
    assert found["forward_tokens"] == cost["forward_tokens"]
    assert not list((broken.workspace / "finished").glob("*.jsonl"))


def test_the_worker_runs_as_a_process_and_publishes_its_result_last(make_job):
    job = make_job("process")
    path = write_job(job)
    done = subprocess.run([sys.executable, "-m", "nanodag.evaluation", str(path)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    result = json.loads((job.workspace / "result.json").read_text())
    assert set(result["metrics"]) == {"words", "bits_per_byte", "continuation"}
    assert result["cost"]["work_seconds"] > 0
    assert not any("seconds" in Path(path).read_text() for path in job.output.rglob("*.json"))


def test_two_benchmarks_of_one_name_are_refused():
    twice = {"name": "gsm8k", "source": "hub:openai/gsm8k/main:test"}
    with pytest.raises(ValueError, match="two benchmarks are called 'gsm8k'"):
        EvalStage(kind="eval", benchmarks=(twice, twice))
