"""Ranks of the supervised worker, forked from one process that has imported everything: half a second each, not eight.

A rank is the worker's own `main`, in a process of its own, with the variables that torchrun would set.
"""

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

from tests.train.stages import metrics

CPU_ONLY = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
LATE = ("torch._dynamo", "deepspeed.runtime.zero.muon.original_muon")  # seconds, when the first engine is made
LIMIT_S = 300.0


@functools.cache
def _imported() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nanodag.train.__main__", *LATE])
    with mock.patch.dict(os.environ, CPU_ONLY):
        forkserver.ensure_running()
    return context


def _rank(job: Path, rank: int, world: int, port: int) -> None:
    with (job.parent / "worker.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(CPU_ONLY, **({name: str(value) for name, value in own.items()} if world > 1 else {}))
    sys.argv = ["nanodag.train", str(job)]
    from nanodag.train import peak
    from nanodag.train.__main__ import main

    peak.BUDGET_S = 0.01  # of half a second a rank; nobody asks how fast it was
    try:
        main()
    except Exception:
        logging.exception("The stage failed.")
        os._exit(1)


def start(workspace: Path, *, num_ranks: int) -> list[BaseProcess]:
    """All ranks of the job in a workspace."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = workspace / "job.json"
    ranks = [_imported().Process(target=_rank, args=(job, rank, num_ranks, port)) for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    return ranks


def end(ranks: list[BaseProcess]) -> list[int | None]:
    """Wait for all ranks; when one fails the others are ended, as torchrun does. Their exit codes."""
    deadline = time.monotonic() + LIMIT_S
    while any(rank.is_alive() for rank in ranks):
        if time.monotonic() > deadline or any(rank.exitcode not in (None, 0, 75) for rank in ranks):
            for rank in ranks:
                rank.kill()
        time.sleep(0.01)
    return [rank.exitcode for rank in ranks]


def interrupt(ranks: list[BaseProcess], workspace: Path, *, after_step: int, with_signal: signal.Signals) -> bool:
    """Send all ranks a signal once a step is logged, and wait for them; False when they were done before it came."""
    deadline = time.monotonic() + LIMIT_S
    while max((line["step"] for line in metrics(workspace)), default=0) < after_step:
        assert all(rank.is_alive() for rank in ranks), (workspace / "worker.log").read_text()[-6000:]
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid or 0, with_signal)
    end(ranks)
    return not (workspace / "result.json").exists()
