"""The highest matmul speed of a device, which model FLOPs utilisation is a share of."""

import time

import torch

# Dense bfloat16 peaks by the name that CUDA gives, from NVIDIA's data sheets.
GPU_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "4090": 165e12,
}
SIZE = 768
BUDGET_S = 0.4


def matmul_peak(device: str) -> float:
    """FLOPs a second of one rank's device in the precision that it multiplies fastest: from the table for a known GPU,
    else the best of a few square matmuls in float32 and in bfloat16, measured in under a second."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        for part, peak in GPU_PEAKS.items():
            if part in name:
                return peak
    return max(_measured(device, dtype) for dtype in (torch.float32, torch.bfloat16))


def _measured(device: str, dtype: torch.dtype) -> float:
    a = torch.randn(SIZE, SIZE, device=device).to(dtype)
    b = torch.randn(SIZE, SIZE, device=device).to(dtype)
    seconds = _cpu_seconds if device == "cpu" else _device_seconds
    best = float("inf")
    deadline = time.perf_counter() + BUDGET_S
    while time.perf_counter() < deadline:
        best = min(best, seconds(a, b))
    return 2 * SIZE**3 / best


def _cpu_seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    """CPU time by thread, not wall time: on a busy machine that would give a low peak, and an MFU above 1."""
    began = time.process_time()
    a @ b
    return max(time.process_time() - began, 1e-9) / torch.get_num_threads()


def _device_seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    began = time.perf_counter()
    a @ b
    torch.cuda.synchronize()
    return time.perf_counter() - began
