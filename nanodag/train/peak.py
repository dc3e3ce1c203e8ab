"""The highest matmul speed of a device, which model FLOPs utilisation is a share of."""

import math
import time

import torch

from nanodag.host.machine import FAST_BF16_CAPABILITY, gpu_of_cuda
from nanodag.model.cpu_linear import times_transposed

CPU_SIZE = 768
BUDGET_S = 0.4
LARGEST_GPU_SIZE, SMALLEST_GPU_SIZE = 8192, 1024
MEMORY_SHARE = 1 / 8  # of what is free on a GPU


def matmul_peak(device: str) -> float:
    """FLOPs a second of one rank's device in the precision that it multiplies fastest: from a data sheet for a known
    GPU, else the best of square matmuls in float32 and in bfloat16, measured in a second or a few."""
    formats = (torch.float32, torch.bfloat16)
    if device != "cuda":
        return max(map(_measured_on_cpu, formats))
    of = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = float(f"{of.major}.{of.minor}")
    known = known_peak(of.name, of.total_memory, capability)
    # Before Ampere cuBLAS refuses bfloat16, or emulates it.
    return known or max(map(_measured_on_gpu, formats if capability >= FAST_BF16_CAPABILITY else formats[:1]))


def known_peak(name: str, memory: int, capability: float) -> float:
    """A GPU's bfloat16 peak by its data sheet, as CUDA describes it; 0 for one that is not known, or that multiplies
    bfloat16 slowly: its tensor cores are for float16, in which nothing is trained."""
    return gpu_of_cuda(name, memory, capability).peak if capability >= FAST_BF16_CAPABILITY else 0.0


def _measured_on_cpu(dtype: torch.dtype) -> float:
    a, b = (torch.randn(CPU_SIZE, CPU_SIZE).to(dtype) for _ in range(2))
    deadline, seconds = time.perf_counter() + BUDGET_S, [_cpu_seconds(a, b)]
    while time.perf_counter() < deadline:
        seconds.append(_cpu_seconds(a, b))
    return 2 * CPU_SIZE**3 / min(seconds)


def _measured_on_gpu(dtype: torch.dtype) -> float:
    from torch.utils.benchmark import Timer  # takes 0.2 s, and most GPUs are known

    # Square matrices as large as an eighth of its free memory takes three of, for small ones do not fill it.
    rows = math.isqrt(int(torch.cuda.mem_get_info()[0] * MEMORY_SHARE) // (3 * dtype.itemsize))
    size = max(SMALLEST_GPU_SIZE, min(LARGEST_GPU_SIZE, 1 << (max(rows, 1).bit_length() - 1)))
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    products = Timer("torch.mm(a, b, out=out)", globals={"a": a, "b": b, "out": torch.empty_like(a)})
    products.timeit(1)  # cuBLAS chooses and loads its kernel
    return 2 * size**3 / min(products.blocked_autorange(min_run_time=BUDGET_S).times)


def _cpu_seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    """CPU time by thread, not wall time: on a busy machine that would give a low peak, and an MFU above 1."""
    began = time.process_time()
    times_transposed(a, b)
    return max(time.process_time() - began, 1e-9) / torch.get_num_threads()
