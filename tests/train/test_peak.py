"""The matmul peak that model FLOPs utilisation is a share of."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.utils.benchmark

from nanodag.train import peak

GIB = 1 << 30


def test_time_in_which_other_processes_run_does_not_lower_the_peak_of_a_cpu(monkeypatch):
    monkeypatch.setattr(peak, "times_transposed", lambda a, b: time.sleep(0.05))  # as when they hold the processor
    assert peak._cpu_seconds(torch.ones(1), torch.ones(1)) < 0.02


@pytest.mark.parametrize(
    ("name", "memory", "capability", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, 9.0, 989),
        ("NVIDIA H100 PCIe", 79.1, 9.0, 756),
        ("NVIDIA H200", 139.7, 9.0, 989),
        ("NVIDIA A100-SXM4-40GB", 39.4, 8.0, 312),
        ("NVIDIA A10G", 22.0, 8.6, 70),
        ("NVIDIA GeForce RTX 4090", 23.5, 8.9, 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, 8.9, 0),  # half as fast as its namesake
        ("NVIDIA RTX A6000", 47.4, 8.6, 155),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, 8.9, 0),
        ("Tesla T4", 14.6, 7.5, 0),  # its 65e12 are of float16
    ],
)
def test_a_known_gpu_has_the_bfloat16_peak_of_its_data_sheet(name, memory, capability, tera):
    assert peak.known_peak(name, int(memory * GIB), capability) == tera * 1e12


def test_the_peak_of_an_unknown_gpu_is_that_of_its_fastest_lot(monkeypatch):
    """A GPU on which a product of 4,096 rows takes 1 ms at best. torch.utils.benchmark makes lots so large that a wait
    for it counts for nothing; the first product, in which cuBLAS loads, is none of them."""
    asked = []

    class Timer:
        def __init__(self, statement, globals):
            self.run = lambda: exec(statement, {"torch": torch, **globals})
            self.out = globals["out"]

        def timeit(self, number):
            asked.append(("first", number))
            self.run()

        def blocked_autorange(self, min_run_time):
            self.run()
            asked.append((tuple(self.out.shape), self.out.dtype, min_run_time))
            return SimpleNamespace(times=[2e-3, 1e-3, 3e-3])

    monkeypatch.setattr(torch.utils.benchmark, "Timer", Timer)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, GIB))
    monkeypatch.setattr(torch, "randn", lambda *shape, device: torch.empty(shape, device="meta"))
    found = peak._measured_on_gpu(torch.bfloat16)
    assert asked == [("first", 1), ((4096, 4096), torch.bfloat16, peak.BUDGET_S)]
    assert found == pytest.approx(2 * 4096**3 / 1e-3)


def test_the_peak_of_a_cpu_is_that_of_the_faster_precision(monkeypatch):
    speeds = {torch.float32: 60e9, torch.bfloat16: 5e9}
    monkeypatch.setattr(peak, "_measured_on_cpu", speeds.get)
    assert peak.matmul_peak("cpu") == 60e9
    speeds[torch.bfloat16] = 400e9
    assert peak.matmul_peak("cpu") == 400e9
