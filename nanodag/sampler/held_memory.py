"""What this process holds of its device, and how it gives back what it has freed."""

import ctypes

import torch

from nanodag.host import process_memory


def give_back(device: torch.device) -> None:
    """Let other processes have the memory that this one has freed: torch, and the C library, keep it else."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # glibc's
        library.malloc_trim(0)


def held_memory(device: torch.device) -> dict[str, int]:
    """Bytes now, and the most since this was asked last: of a GPU what torch has, on a CPU all of the process."""
    if device.type != "cuda":
        return {"peak_bytes": process_memory.peak_bytes(), "bytes": process_memory.resident_bytes()}
    found = {"peak_bytes": torch.cuda.max_memory_reserved(device), "bytes": torch.cuda.memory_reserved(device)}
    torch.cuda.reset_peak_memory_stats(device)
    return found
