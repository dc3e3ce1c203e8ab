"""The environment that SGLang lives in: `nanodag sampler install`. No torch here.

SGLang pins another transformers than the trainer, so it has an environment of its own (nanodag.external_envs). All that
goes into it stands in `sglang-cpu.txt` (without CUDA) or `sglang-cuda.txt` beside this file, so pip chooses nothing.
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

PYTHON_VARIABLE = "NANODAG_SGLANG_PYTHON"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_TIMEOUT_S = 3.0
SGLANG_CAPABILITY = 8.0  # compute capability that its kernels are built for
LEAST_GLIBC = (2, 34)  # of its wheel's tag, manylinux_2_34
NEEDED_BYTES = {"cpu": 4 * 10**9, "cuda": 14 * 10**9}  # of disk, while it is installed


def sglang_environment(device: Device) -> PackageEnvironment:
    """SGLang's, for a CPU or a GPU."""
    return PackageEnvironment(
        name=f"sglang-{device}",
        package="sglang",
        listed=Path(__file__).with_name(f"sglang-{device}.txt"),
        variable=PYTHON_VARIABLE,
        command=f"nanodag sampler install --{device}",
    )


def find_python(configured: str, device: Device) -> Path:
    """The interpreter of SGLang's environment: the one that is configured, else the one that NANODAG_SGLANG_PYTHON
    names, else of the environment that `install` made. Raises MissingTool where there is none."""
    who = "sampler.engine sglang needs SGLang"
    return sglang_environment(device).find_python(configured, setting="sampler.python", who=who)


def install(device: Device, folder: Path, say: Say, *, show: Say = silent, cpu_index: str = CPU_INDEX) -> Path:
    """Make the environment, or finish it; returns its interpreter. Raises MissingTool when a step fails.

    say gets what is begun and done, show twice a second how far it is. cpu_index: where torch's builds for a CPU are,
    beside the package index that pip is set to.
    """
    made = sglang_environment(device)

    def first() -> None:
        if (free := shutil.disk_usage(folder).free) < NEEDED_BYTES[device]:
            raise MissingTool(f"SGLang takes {size(NEEDED_BYTES[device])}, and {size(free)} are free in {folder}.")
        if device == "cpu":
            say("torch, built for a CPU")
            extra = ["--extra-index-url", cpu_index] if _is_reachable(cpu_index) else []
            made.pip(folder, ["--no-deps", *extra, f"torch=={_torch_of(made)}"], 1, show)

    return made.install(folder, say, show, first=first)


def why_not_on(gpus: Sequence[ListedGpu], glibc: str) -> str:
    """Reason why SGLang does not run on a machine, in a sentence; empty where it does. glibc: as `2.36`."""
    if not gpus:
        return "there is no NVIDIA GPU here"
    if (weakest := min(gpu.gpu.capability for gpu in gpus)) < SGLANG_CAPABILITY:
        return f"a GPU has compute capability {weakest}, and SGLang needs {SGLANG_CAPABILITY}"
    if tuple(int(part) for part in glibc.split(".")[:2]) < LEAST_GLIBC:
        return f"glibc is {glibc}, and SGLang's wheel needs {'.'.join(map(str, LEAST_GLIBC))}"
    torch = TorchBuild(version=_torch_of(sglang_environment("cuda")), cuda="13.0")
    return next(iter(gpu_faults(gpus, torch, "SGLang")), "")


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
