"""The matmul peak that model FLOPs utilisation is a share of."""

import time

import torch

from nanodag.train import peak


def test_the_peak_is_that_of_the_faster_precision(monkeypatch):
    speeds = {torch.float32: 60e9, torch.bfloat16: 5e9}
    monkeypatch.setattr(peak, "_measured", lambda device, dtype: speeds[dtype])
    assert peak.matmul_peak("cpu") == 60e9
    speeds[torch.bfloat16] = 400e9
    assert peak.matmul_peak("cpu") == 400e9


class Interrupted:
    """A matrix whose product waits, as when other processes hold the processor."""

    def __matmul__(self, other):
        time.sleep(0.05)


def test_time_in_which_other_processes_run_does_not_lower_the_peak_of_a_cpu():
    assert peak._cpu_seconds(Interrupted(), Interrupted()) < 0.02
