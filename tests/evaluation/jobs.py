"""Runs an eval stage's job in this process, and what it left."""

from typing import Any

from nanodag.evaluation import __main__ as worker
from nanodag.store.atomic import sha256_of
from nanodag.worker.job import Job, MetricsLog


def evaluate(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics and cost, as the worker has them."""
    log = MetricsLog(job)
    try:
        return worker.evaluate_checkpoint(job, log)
    finally:
        log.close()


def bytes_of(job: Job) -> dict[str, str]:
    """The digest of each file of the output, by its path."""
    return {
        path.relative_to(job.output).as_posix(): sha256_of(path) for path in job.output.rglob("*") if path.is_file()
    }
