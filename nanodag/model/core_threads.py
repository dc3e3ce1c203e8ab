"""Runs compiled work on as many threads as torch uses: a call through ctypes lets other threads run."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


def on_threads(work: Callable[[int, int], None]) -> None:
    """Call work(thread, num_threads) once for each of torch's threads, at the same time."""
    count = torch.get_num_threads()
    if count == 1:
        work(0, 1)
    else:
        list(_pool(count).map(work, range(count), [count] * count))


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="core")
