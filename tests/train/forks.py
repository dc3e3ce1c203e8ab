"""Ranks of the supervised worker, each a fork, with the variables that torchrun would set."""

import os
import signal
import socket
import time
from pathlib import Path

from tests.forks import CPU_ONLY, LIMIT_S, Forked, start_module
from tests.train.stages import metrics


def start(workspace: Path, *, num_ranks: int) -> list[Forked]:
    return start_ranks("nanodag.train", workspace / "job.json", num_ranks=num_ranks, log=workspace / "worker.log")


def start_ranks(module: str, *arguments: object, num_ranks: int, log: Path) -> list[Forked]:
    """That many of a module, which find each other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, **CPU_ONLY}
    if num_ranks > 1:
        environment |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        start_module(
            module,
            *arguments,
            environment={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else environment,
            log=log,
        )
        for rank in range(num_ranks)
    ]


def end(ranks: list[Forked]) -> list[int | None]:
    """Wait for all ranks; when one fails the others are ended, as torchrun does. Their exit codes."""
    deadline = time.monotonic() + LIMIT_S
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline or any(rank.poll() not in (None, 0, 75) for rank in ranks):
            for rank in ranks:
                rank.kill()
        time.sleep(0.01)
    return [rank.poll() for rank in ranks]


def interrupt(workspace: Path, *, after_step: int, with_signal: signal.Signals, num_ranks: int = 1) -> list[int | None]:
    """Run all ranks until a step is logged, send them a signal, and wait for them; their exit codes."""
    ranks, deadline = start(workspace, num_ranks=num_ranks), time.monotonic() + LIMIT_S
    while max((line["step"] for line in metrics(workspace)), default=0) < after_step:
        assert all(rank.poll() is None for rank in ranks), (workspace / "worker.log").read_text()[-6000:]
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for rank in ranks:
        rank.send_signal(with_signal)
    return end(ranks)
