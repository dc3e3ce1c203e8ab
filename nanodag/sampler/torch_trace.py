"""torch's trace of what a block does, for chrome://tracing or ui.perfetto.dev."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def traced(path: Path) -> Iterator[None]:
    """Trace what this thread and this process's GPU do; the file, a .json or .json.gz, is written at the end."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
    with profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(str(path))
