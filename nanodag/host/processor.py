"""This machine's processor: its cores and instruction set. No torch: the control plane asks."""

import functools
import os
from pathlib import Path
from typing import Any

from nanodag.host.beside import table_beside

# oneDNN does torch's matrix products and can be told to use less than the processor has.
ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
# oneDNN, and torch's layer above it, each keep what they compiled for a shape: 0.3 to 0.7 MB a shape, 1,024 shapes.
# RL's micro-batches differ in length each time, so that its trainer grew by 10 MB a step. One micro-batch has some 20.
SHAPE_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
SETS: dict[str, Any] = table_beside(__file__, "processors.yaml")


def usable_cores() -> int:
    """Cores that this process may use: by its affinity, or fewer where its control group has a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for path in control_group_files("cpu.max"):
        quota, _, period = read_limit(path).partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def control_group_files(name: str) -> list[Path]:
    """The files of that name of this process's control group (version 2) and of those above it, which limit it too."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    group = next((line.partition("::")[2] for line in lines if line.startswith("0::")), "/")
    folder = root / group.lstrip("/")
    folders = [folder, *folder.parents]
    return [path / name for path in folders if path == root or root in path.parents]


def read_limit(path: Path) -> str:
    """Text of a control group's file; empty where it is not there."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def instruction_set() -> str:
    """The widest of `amx`, `avx512_bf16`, `avx512`, `avx2` that matrix products here may use; `other` for less."""
    flags = processor_facts().get("flags", "").split()
    limits = [os.environ[name].upper() for name in ISA_LIMITS if os.environ.get(name)]
    for name, of in SETS.items():
        if of["flag"] in flags and all(limit.startswith(tuple(of["limits"])) for limit in limits):
            return name
    return "other"


def numerics(torch: str) -> str:
    """Text of all that decides the bits of a sum here, beside the program: two machines that say the same round alike.
    torch: its version."""
    return f"{instruction_set()}, torch {torch}"


@functools.cache
def processor_facts() -> dict[str, str]:
    """Linux's description of the first core, by field, as `model name` and `flags`; nothing elsewhere."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    fields = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}
