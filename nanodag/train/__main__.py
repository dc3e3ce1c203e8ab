"""The supervised worker: `python -m nanodag.train job.json`, plainly or by torchrun, for pretrain, midtrain and sft."""

import time

STARTED = time.perf_counter()

# ruff: noqa: E402 - the clock starts before the slow imports
import logging
import os
import resource
import sys
from typing import Any

from nanodag.config.supervised import SupervisedStage
from nanodag.train.deepspeed_engine import leave
from nanodag.train.loop import Loop, Stopped
from nanodag.train.setup import PreparedStage
from nanodag.worker.job import STOPPED_EXIT_CODE, Job, MetricsLog, finish, load_job

log = logging.getLogger("nanodag.train")


def main() -> None:
    """Run the job; the exit code says whether to start it again (75), a published result whether it is done."""
    job = load_job()
    stage = PreparedStage(job)
    engine = stage.engine
    loop = Loop(stage)
    resume_step = -1 if stage.checkpoint is None else loop.progress.step  # without one, step 0 is validated again
    metrics_log = MetricsLog(job, resume_step=resume_step) if engine.rank == 0 else None
    if metrics_log is not None:
        loop.write = metrics_log.write
    start_seconds = time.perf_counter() - STARTED
    loop.write(loop.progress.step, total=stage.num_steps, event="phase", phase="training", start_s=start_seconds)
    log.info("Started in %.1f s; %d steps to do.", start_seconds, stage.num_steps - loop.progress.step)
    try:
        loop.run()
    except Stopped:
        log.info("Stopped on request at step %d, with a checkpoint.", loop.progress.step)
        leave(STOPPED_EXIT_CODE)
    stage.export(job.output)
    stats = _summed_stats(stage)
    if metrics_log is not None:
        metrics_log.close()
        finish(job, metrics=_metrics(loop, stats), cost=_cost(job, stage, loop, start_seconds))
    leave()


def _summed_stats(stage: PreparedStage) -> dict[str, Any]:
    stats = stage.source.stats()
    totals: dict[str, Any] = _sums(stage, {n: value for n, value in sorted(stats.items()) if isinstance(value, int)})
    sources = map(dict, stats["sources"])
    return totals | {"rows_trained": [{"url": source.pop("url"), **_sums(stage, source)} for source in sources]}


def _sums(stage: PreparedStage, counts: dict[str, int]) -> dict[str, int]:
    own = stage.group.counted(*map(float, counts.values()))
    return dict(zip(counts, map(int, stage.engine.summed(*own)), strict=True))


def _metrics(loop: Loop, stats: dict[str, Any]) -> dict[str, Any]:
    progress = loop.progress
    metrics: dict[str, Any] = {
        "loss": progress.last_losses[-1] if progress.last_losses else None,
        "steps": progress.step,
        "planned_steps": loop.stage.num_steps,
        "stopped_early": progress.stopped_early,
        "filled_share": stats["tokens"] / max(stats["tokens"] + stats["padding"], 1),
        **{name: value for name, value in stats.items() if name not in ("batches", "document_tokens")},
    }
    if loop.config.is_chat:
        metrics["document_share"] = stats["document_tokens"] / max(stats["tokens"], 1.0)
    for name in ("loss", "bits_per_byte", "accuracy"):
        best, last = getattr(progress, f"best_{name}"), getattr(progress, f"validation_{name}")
        metrics[f"best_validation_{name}"] = best
        metrics[f"validation_{name}"] = best if loop.best is not None else last
    metrics |= {"best_step": None if progress.best_loss is None else progress.best_step, "core": progress.core}
    metrics |= {f"benchmark_{name}": value for name, value in progress.benchmarks.items()}
    return {name: value for name, value in metrics.items() if value is not None or name == "loss"}


def _cost(job: Job, stage: PreparedStage, loop: Loop, start_seconds: float) -> dict[str, Any]:
    progress = loop.progress
    config: SupervisedStage = job.config
    flops = stage.flops_per_token * progress.tokens
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "seconds": round(time.perf_counter() - STARTED, 3),
        "cpu_seconds": round(sum(u.ru_utime + u.ru_stime for u in usage) * stage.engine.world_size, 3),
        "start_seconds": round(start_seconds, 3),
        "step_seconds": round(progress.seconds, 3),
        "step_ms": round(1000 * progress.seconds / max(progress.step, 1), 3),
        "tokens": int(progress.tokens),
        "flops": stage.matrix_flops_per_token * progress.tokens,
        "mfu": flops / progress.seconds / stage.peak_flops if progress.seconds else None,
        "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else None,
        "peak_device_bytes": stage.engine.highest_device_bytes(),
        "num_ranks": stage.engine.world_size,
        "threads": config.resources.threads,
        "device": str(config.resources.device),
        "precision": config.precision,
        "zero_stage": config.zero_stage,
    }


if __name__ == "__main__":
    try:
        main()
    except Exception:
        log.exception("The stage failed.")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a normal exit would wait for ranks that wait for this one
