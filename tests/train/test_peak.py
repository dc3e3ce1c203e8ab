"""The matmul peak that model FLOPs utilisation is a share of."""

import torch

from nanodag.train import peak


def test_the_peak_is_that_of_the_faster_precision(monkeypatch):
    speeds = {torch.float32: 60e9, torch.bfloat16: 5e9}
    monkeypatch.setattr(peak, "_measured", lambda device, dtype: speeds[dtype])
    assert peak.matmul_peak("cpu") == 60e9
    speeds[torch.bfloat16] = 400e9
    assert peak.matmul_peak("cpu") == 400e9
