"""This machine's processor and GPUs: cores, and what they multiply fast. No torch: the control plane asks."""

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path

# Processors that multiply bfloat16 at least twice as fast as float32. Others emulate it: AVX2, 5 GFLOP a CPU-second
# where float32 has 60; AVX-512 without this extension is in between.
FAST_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
FAST_BF16_CAPABILITY = 8.0  # NVIDIA's Ampere
# oneDNN does torch's matrix products and can be told to use less than the processor has.
ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
ISAS_WITH_BF16 = ("DEFAULT", "ALL", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10")


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def multiplies_bf16_fast(device: str) -> bool:
    """Whether a device of this machine, `cpu` or `cuda`, multiplies bfloat16 faster than float32."""
    if device == "cuda":
        capabilities = gpu_capabilities()
        return not capabilities or min(capabilities) >= FAST_BF16_CAPABILITY
    limits = [os.environ[name].upper() for name in ISA_LIMITS if os.environ.get(name)]
    return bool(processor_flags() & FAST_BF16_FLAGS) and all(limit.startswith(ISAS_WITH_BF16) for limit in limits)


@functools.cache
def processor_flags() -> frozenset[str]:
    """What Linux says that the processor can do, as `avx2` and `avx512_bf16`; nothing elsewhere."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


@functools.cache
def gpu_capabilities() -> tuple[float, ...]:
    """The CUDA compute capability of each GPU, as 9.0; nothing where nvidia-smi is not there or does not say."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return tuple(float(line) for line in done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
