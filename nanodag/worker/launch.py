"""Starts a stage's worker, watches it, and turns its end into a result or one readable error.

`python -m nanodag.worker.launch job.json` is the worker of a user's kind that stands beside the pipeline file. That
folder is on no path of Python's, as what else lies there must hide no installed package.
"""

import contextlib
import json
import math
import os
import runpy
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanodag.children.child import Child, start_child
from nanodag.config.kinds import find_kind
from nanodag.host.beside import table_beside
from nanodag.host.ports import network_environment
from nanodag.own_code.trusted_modules import is_beside
from nanodag.worker.failure import LOOK_BACK_LINES, Ended, cause_of, explained
from nanodag.worker.job import Job, read_job, write_job
from nanodag.worker.logs import Tail
from nanodag.worker.watchdog import STOP_TIMEOUT

LOG_NAME = "worker.log"
USAGE_NAME = "usage.jsonl"
BEGAN_NAME = "began"  # when the try under way began: of one whose watchdog was killed too, nothing else remains
POLL_S = 0.2
NICENESS = 10  # of a stage that runs beside another
SHORTEST_END_S = 10.0  # of a watchdog, however short a stage's own time is
_FOR_ALL: dict[str, str] = table_beside(__file__, "environment.yaml")  # variables of every worker
ENDS_WITHIN = 3  # times stop_timeout_s a watchdog ends: SIGTERM and SIGKILL, for a group and its orphans


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Callbacks of a worker's caller, and its stop signal. on_line gets each line of its log, on_metrics each record of
    metrics.jsonl, as they appear. stop: set to end it. restarts, restarts_left: as in nanodag.worker.failure.Ended."""

    on_line: Callable[[str], None] = lambda line: None
    on_metrics: Callable[[dict[str, Any]], None] = lambda metrics: None
    stop: threading.Event = field(default_factory=threading.Event)
    restarts: int = 0
    restarts_left: int = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result that a worker published. start_s: from launch to its first metrics line or its end; work_s: the rest."""

    metrics: Mapping[str, Any]
    cost: Mapping[str, Any]
    start_s: float
    work_s: float


def worker_command(module: str, job_path: Path, *, num_ranks: int, nodes: int = 1) -> list[str]:
    """One Python process, or torchrun with num_ranks of them on this host, or on so many nodes."""
    if nodes > 1:
        return [sys.executable, "-m", "nanodag.worker.nodes", module, str(job_path)]
    if num_ranks == 1:
        return [sys.executable, "-m", module, str(job_path)]
    launcher = [sys.executable, "-m", "nanodag.train.torchrun", "--standalone", f"--nproc_per_node={num_ranks}"]
    return [*launcher, "-m", module, str(job_path)]


def worker_environment(threads: int, *, device: str = "cpu", gpus: str = "") -> dict[str, str]:
    """This process's environment with thread counts set. Waiting threads sleep: two processes may share two cores.

    gpus: those it may use, as CUDA_VISIBLE_DEVICES names them; empty for all.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_AUTH_STRING"}
    environment |= _FOR_ALL
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    environment["DS_ACCELERATOR"] = "cuda" if device == "cuda" else "cpu"
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        # Keep freed memory: a step's large tensors are else mapped again each time, and their page faults took two
        # thirds of the time of the output head's matrix product.
        environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))  # the most that glibc takes
        environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 40))
    elif gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    return environment


@contextlib.contextmanager
def _spawned(command: list[str], job: Job, *, environment: Mapping[str, str], hold: Sequence[int]) -> Iterator[Child]:
    """A process under the watchdog; ended with its whole group when the block is left, however it is left."""
    read_end, write_end = os.pipe()
    is_beside_another = find_kind(job.config.kind).is_beside and not job.context.get("waited_for")
    stop_timeout_s, niceness = job.config.stop_timeout_s, NICENESS if is_beside_another else 0
    watched = [sys.executable, "-m", "nanodag.worker.watchdog", str(read_end), str(job.workspace / USAGE_NAME)]
    child = start_child(
        [*watched, str(niceness), *command],
        # torchrun ends its ranks by itself, and kills them after 30 s where it is not told otherwise.
        environment={
            **environment,
            STOP_TIMEOUT: str(stop_timeout_s),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(stop_timeout_s)),
        },
        files=(read_end, *hold),
        log_path=job.workspace / LOG_NAME,
    )
    os.close(read_end)
    try:
        yield child
    finally:
        os.close(write_end)
        # It has seen the closed pipe; should another process hold a copy of that end, it hears of it by signal.
        ends_within_s = max(SHORTEST_END_S, ENDS_WITHIN * stop_timeout_s)
        if not child.wait(ends_within_s):
            child.stop(ends_within_s)
        child.kill()


def run_worker(job: Job, *, gpus: str = "", hold: Sequence[int] = (), watch: Watch | None = None) -> Result:
    """Run a stage's worker to its end, with the processes and time that its config says; returns what it published.

    When this call is left by an exception (cancel, Ctrl-C), or once `watch.stop` is set, the worker's whole process
    group is ended first. gpus: as of `worker_environment`. hold: file descriptors of locks that must outlive this
    process until that is done.

    Raises StageFailed, or the class below it that fits (nanodag.worker.failure), with the reason, what to do, the
    workspace and the last log lines when no result was published.
    """
    watch, kind, resources = watch or Watch(), find_kind(job.config.kind), job.config.resources
    num_ranks, nodes = (int(resources.num_ranks), resources.num_nodes) if kind.has_ranks else (1, 1)
    module, timeout_s = kind.module, job.config.timeout_s
    (job.workspace / "result.json").unlink(missing_ok=True)
    if (code := str(job.context.get("code", ""))) and is_beside(module, Path(code)):
        module = __name__
    command = worker_command(module, write_job(job), num_ranks=num_ranks, nodes=nodes)
    environment = worker_environment(int(resources.threads), device=str(resources.device), gpus=gpus)
    if nodes == 1 and num_ranks > 1:
        environment.update(network_environment())
    log_tail, metrics_tail = (Tail(path, from_now=True) for path in (job.workspace / LOG_NAME, job.metrics_path))
    last_lines: deque[str] = deque(maxlen=LOOK_BACK_LINES)
    began, oom_kills = time.monotonic(), _num_oom_kills()
    first_metrics = 0.0
    is_over_time = was_asked = False
    with _spawned(command, job, environment=environment, hold=hold) as child:
        alive = True
        while alive and not (is_over_time or was_asked):
            alive = not child.wait(POLL_S)
            for line in log_tail.lines():
                last_lines.append(line)
                watch.on_line(line)
            for line in metrics_tail.lines():
                first_metrics = first_metrics or time.monotonic()
                with contextlib.suppress(ValueError):
                    watch.on_metrics(json.loads(line))
            is_over_time = time.monotonic() - began > timeout_s
            was_asked = alive and watch.stop.is_set()
    end = time.monotonic()
    result_path = job.workspace / "result.json"
    if not result_path.exists():
        last_lines.extend(log_tail.lines())  # what it said while it was being ended
        ended = Ended(
            code=child.code if child.code >= 0 else 128 - child.code,
            lines=list(last_lines),
            timeout_s=timeout_s if is_over_time else 0.0,
            was_asked=was_asked,
            out_of_memory=_num_oom_kills() > oom_kills,
            restarts=watch.restarts,
            restarts_left=watch.restarts_left,
        )
        composed = str(job.context.get("composed", ""))
        cause = cause_of(ended, stage=job.name, kind=job.config.kind, run=job.run, composed=composed)
        raise cause.error(explained(cause, stage=job.name, folder=job.workspace, log_name=LOG_NAME, lines=ended.lines))
    raw = json.loads(result_path.read_text())
    first_metrics = first_metrics or end
    return Result(metrics=raw["metrics"], cost=raw["cost"], start_s=first_metrics - began, work_s=end - first_metrics)


def begin_try(workspace: Path) -> float:
    """Note that a stage's try begins now; returns the seconds that those before it took.

    A try that left no line of usage, as its watchdog was killed with it, gets one: from its begin to the last that was
    written of it. What it took of the CPU is not known.
    """
    path, now = workspace / BEGAN_NAME, time.time()
    lines = _json_lines(workspace / USAGE_NAME)
    began = float(path.read_text() or now) if path.exists() else now  # empty where the disk was full
    if began < now and not any(line["began"] >= began for line in lines):
        written = [workspace / LOG_NAME, workspace / "metrics.jsonl"]
        last = max((path.stat().st_mtime for path in written if path.exists()), default=began)
        lost = {"began": began, "seconds": round(max(0.0, last - began), 3), "cpu_s": 0.0, "peak_bytes": 0}
        with (workspace / USAGE_NAME).open("a", encoding="utf-8") as stream:
            stream.write("\n" + json.dumps(lost | {"code": None}) + "\n")  # behind a line that a full disk cut
    path.write_text(f"{now:.3f}")
    return usage_of(workspace)["seconds"]


def usage_of(workspace: Path) -> dict[str, float]:
    """Usage of all tries in a workspace: `seconds`, `earlier_seconds` (all but the last), `cpu_seconds` (over all
    nodes), `peak_bytes` (of all processes on a node together), `num_attempts`."""
    lines = _json_lines(workspace / USAGE_NAME)
    everywhere = [*lines, *(line for path in sorted(workspace.glob("usage-*.jsonl")) for line in _json_lines(path))]
    return {
        "seconds": round(sum(line["seconds"] for line in lines), 3),
        "earlier_seconds": round(sum(line["seconds"] for line in lines[:-1]), 3),
        "cpu_seconds": round(sum(line["cpu_s"] for line in everywhere), 3),
        "peak_bytes": max((line.get("peak_bytes", 0) for line in everywhere), default=0),
        "num_attempts": len(lines),
    }


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in path.read_text().splitlines() if x.endswith("}")] if path.exists() else []


def _num_oom_kills() -> int:
    """Number of processes that the kernel's out-of-memory killer has ended on this machine, where /proc tells."""
    path = Path("/proc/vmstat")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


if __name__ == "__main__":
    own_job = read_job(Path(sys.argv[1]))  # its kind is imported from beside the pipeline file; so is the worker
    runpy.run_module(find_kind(own_job.config.kind).module, run_name="__main__", alter_sys=True)
