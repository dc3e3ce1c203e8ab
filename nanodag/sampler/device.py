"""The device that a process computes on: the memory held there, which may be given back, and a trace of its work."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from nanodag.host.process_memory import peak_bytes


def give_back(device: torch.device) -> None:
    """Let other processes have the memory that this one has freed: torch, and the C library, keep it else."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # glibc's
        library.malloc_trim(0)


def held_memory(device: torch.device) -> dict[str, int]:
    """Bytes now, and the most since this was asked last: of a GPU what torch has, on a CPU all of the process."""
    if device.type != "cuda":
        return {"peak_bytes": peak_bytes(), "bytes": psutil.Process().memory_info().rss}
    held = {"peak_bytes": torch.cuda.max_memory_reserved(device), "bytes": torch.cuda.memory_reserved(device)}
    torch.cuda.reset_peak_memory_stats(device)
    return held


@contextmanager
def traced(path: Path) -> Iterator[None]:
    """Trace this thread and this process's GPU by torch, for chrome://tracing or ui.perfetto.dev; the file, a .json or
    .json.gz, is written at the end."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
    with profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(str(path))
