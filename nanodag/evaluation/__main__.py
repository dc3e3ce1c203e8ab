"""Worker of an eval stage: `python -m nanodag.evaluation job.json`. One process, and samplers that it starts."""

import os

os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: progress goes to metrics.jsonl

import json
import logging
import time
from typing import Any

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.errors import SamplerError
from nanodag.evaluation.core import chat_core_of, run_core
from nanodag.evaluation.endpoint import EndpointModel
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.evaluation.forms import check_likelihood, check_served
from nanodag.evaluation.harness import run_benchmark
from nanodag.evaluation.results import BenchmarkResult
from nanodag.evaluation.verifiers_benchmarks import run_environment
from nanodag.evaluation.win_rate import win_rate
from nanodag.model.headers import matrix_parameters
from nanodag.store.atomic import write_json
from nanodag.store.kept_lines import KeptLines
from nanodag.worker.job import Job, MetricsLog, finish, leave_stopped, load_job, stop_requested

log = logging.getLogger("nanodag.evaluation")

REPORT_EVERY_S = 0.5


def main() -> None:
    began = time.monotonic()
    job = load_job()
    # lm-eval warns once a benchmark of how its own custom_dataset option is to be used.
    logging.getLogger("lm_eval.api.task").setLevel(logging.ERROR)
    metrics_log = MetricsLog(job)
    metrics, cost = evaluate_checkpoint(job, metrics_log)
    metrics_log.close()
    finish(job, metrics=metrics, cost={**cost, "work_seconds": time.monotonic() - began})


def evaluate_checkpoint(job: Job, metrics_log: MetricsLog) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill the job's output; returns the stage's metrics and cost.

    A benchmark that was finished before a restart is not asked again, nor are the items that were finished of the one
    that was under way. Progress is told in thousandths of the benchmarks, and in requests of the benchmark under way.
    """
    config = job.config
    progress = _Progress(metrics_log, len(config.benchmarks))
    if config.is_served:
        checkpoint: EvaluatedModel = EndpointModel(config.endpoint, config.max_new_tokens, progress)
    else:
        checkpoint = EvaluatedModel(job.inputs["model"], config, on_progress=progress)
    try:
        return _fill(job, checkpoint, progress)
    except SamplerError:
        if stop_requested():  # which ends the samplers, too
            leave_stopped()
        raise
    finally:
        checkpoint.close()


def _fill(job: Job, checkpoint: EvaluatedModel, progress: "_Progress") -> tuple[dict[str, Any], dict[str, Any]]:
    config = job.config
    samples_folder, finished_folder = job.output / "samples", job.workspace / "finished"
    for needed in (job.workspace / "forms", samples_folder, finished_folder):
        needed.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    cost: dict[str, Any] = {"forward_tokens": 0, "seconds_by_benchmark": {}}
    for number, benchmark in enumerate(config.benchmarks):
        progress.begin(number, benchmark.name)
        done_path = finished_folder / f"{benchmark.name}.json"
        if not done_path.exists():
            began, kept_path = time.monotonic(), done_path.with_suffix(".jsonl")
            tokens_before = checkpoint.tokens_read + checkpoint.tokens_written
            with KeptLines(kept_path) as checkpoint.kept:
                result = _asked(job, checkpoint, benchmark)
            checkpoint.kept = None
            log.log(logging.WARNING if any(result.counts.values()) else logging.INFO, "%s", result)
            result.write_records(samples_folder / f"{result.config.name}.jsonl")
            tokens = checkpoint.tokens_read + checkpoint.tokens_written - tokens_before
            seconds = round(time.monotonic() - began, 3)
            write_json(done_path, {"result": result.as_json(), "tokens": tokens, "seconds": seconds})
            kept_path.unlink()
        done = json.loads(done_path.read_text(encoding="utf-8"))
        results[benchmark.name] = done["result"]
        cost["forward_tokens"] += done["tokens"]
        cost["seconds_by_benchmark"][benchmark.name] = done["seconds"]
        progress.end(done["result"])
    if total := chat_core_of(results, samples_folder):
        log.info("%s", total)
        total.write_records(samples_folder / f"{total.config.name}.jsonl")
        results[total.config.name] = total.as_json()
    samples = _samples(checkpoint, config.sample_prompts, chat=config.chat)
    if not job.config.is_served:
        cost["flops"] = 2 * matrix_parameters(job.inputs["model"]) * cost["forward_tokens"]
    write_json(job.output / "results.json", {"benchmarks": results, "samples": samples})
    return {name: result["value"] for name, result in results.items()}, cost


def _asked(job: Job, checkpoint: EvaluatedModel, benchmark: BenchmarkConfig) -> BenchmarkResult:
    if job.config.is_served:
        check_served(benchmark)
    if benchmark.is_core:
        check_likelihood(benchmark)
        return run_core(checkpoint, benchmark, job.mirror)
    chat, how = job.config.chat, {"seed": job.config.seed, "mirror": str(job.mirror or "")}
    if benchmark.is_environment:
        return run_environment(checkpoint, benchmark, chat=chat, **how)
    result = run_benchmark(checkpoint, benchmark, chat=chat, folder=job.workspace / "forms", **how)
    if benchmark.judge == "none":
        return result
    kept, on_progress = checkpoint.kept, checkpoint.on_progress
    return win_rate(job.inputs["baseline"], result, kept=kept, on_progress=on_progress, **how)


def _samples(checkpoint: EvaluatedModel, prompts: tuple[str, ...], *, chat: bool) -> list[dict[str, str]]:
    if not prompts:
        return []
    checkpoint.is_chat = chat
    checkpoint.switch_template({})
    texts = [checkpoint.apply_chat_template([{"role": "user", "content": p}]) if chat else p for p in prompts]
    completions = checkpoint.complete(texts)
    return [{"prompt": prompt, "completion": text} for prompt, text in zip(prompts, completions, strict=True)]


class _Progress:
    """Turns (done, total) of one benchmark's requests into lines of the metrics log; ends the process when asked to."""

    def __init__(self, metrics_log: MetricsLog, num_benchmarks: int) -> None:
        self._log, self._total = metrics_log, 1000 * num_benchmarks
        self._number, self._name = 0, ""
        self._last, self._step = 0.0, 0

    def begin(self, number: int, name: str) -> None:
        self._number, self._name = number, name
        self._write(0, event="phase", phase=name, done=0, of=0, unit="requests")

    def __call__(self, done: int, total: int) -> None:
        if stop_requested():
            leave_stopped()
        if time.monotonic() - self._last >= REPORT_EVERY_S:
            part = 1000 * done // max(total, 1)
            self._write(part, event="phase", phase=self._name, done=done, of=total, unit="requests")

    def end(self, result: dict[str, Any]) -> None:
        scores = {self._name: result["value"], f"{self._name}_stderr": result["stderr"]}
        self._write(1000, event="eval", benchmark=self._name, **scores)

    def _write(self, part: int, **values: Any) -> None:
        """part: of the benchmark under way that is done, in thousandths."""
        self._last = time.monotonic()
        self._step = max(self._step, 1000 * self._number + part)
        self._log.write(self._step, total=self._total, **values)


if __name__ == "__main__":
    main()
