"""Versions that torch, driver and NCCL of an NVIDIA machine ask of each other. Nothing imports torch here: packages say
what they are.

Sources: NVIDIA, CUDA Toolkit release notes (least driver of a major version, for all its minor ones; least compute
capability); NCCL, src/init.cc (ranks of two versions are refused).
"""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from nanodag.host.machine import ListedGpu

TIMEOUT_S = 60.0

_SAY = """
import importlib.metadata as metadata, importlib.util, json, pathlib, re
found = {"version": "", "cuda": "", "nccl": ""}
if spec := importlib.util.find_spec("torch"):
    text = (pathlib.Path(spec.origin).parent / "version.py").read_text()
    cuda = re.search(r"^cuda\\b[^=\\n]*= *['\\"]([0-9.]+)", text, re.MULTILINE)
    found |= {"version": metadata.version("torch"), "cuda": cuda[1] if cuda else ""}
    for package in metadata.distributions():
        if re.fullmatch(r"nvidia[-_]nccl[-_]cu\\d+", package.metadata["Name"] or ""):
            found["nccl"] = package.version
print(json.dumps(found))
"""


CUDA_NEEDS = {"12": (525, 5.0), "13": (580, 7.5)}
"""Least major version of the driver, and least compute capability of a GPU, that a major version of CUDA asks for."""


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """torch of one environment. version: `2.14.1`, empty for none. cuda: what it is built for, `13.0`; empty for a CPU.
    nccl: `2.30.7`, empty where it is not a package."""

    version: str
    cuda: str = ""
    nccl: str = ""

    def __str__(self) -> str:
        return f"torch {self.version}" + (f" with NCCL {self.nccl}" if self.nccl else "")


def torch_build(python: str) -> TorchBuild | None:
    """torch of an interpreter's environment, by what is installed there; None where that cannot be found out."""
    try:
        done = subprocess.run([python, "-I", "-c", _SAY], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return TorchBuild(**json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return None


def gpu_faults(gpus: Sequence[ListedGpu], build: TorchBuild, python: str) -> list[str]:
    """Sentences on what of this machine's GPUs torch cannot use; of each fault only the first GPU that has it."""
    if build.version and not build.cuda:
        return [
            f"torch {build.version} of {python} is built for a CPU, and the stage is to run on a GPU: remove the "
            "environment and call ./speedrun.sh where nvidia-smi is, or set resources.device=cpu"
        ]
    least_driver, least_capability = CUDA_NEEDS.get(build.cuda.partition(".")[0], (0, 0.0))
    faults: dict[str, str] = {}
    for gpu in gpus:
        what = f"GPU {gpu.index} ({gpu.gpu.name})"
        driver = gpu.driver.partition(".")[0]
        if driver.isdecimal() and int(driver) < least_driver:
            text = (
                f"{what} has the driver {gpu.driver}, and torch {build.version} is built for CUDA {build.cuda}, which "
                f"needs {least_driver} or newer: install that driver"
            )
            faults.setdefault("driver", text)
        if gpu.gpu.capability < least_capability:
            text = (
                f"{what} has compute capability {gpu.gpu.capability}, and CUDA {build.cuda} knows {least_capability} "
                "and newer: leave it out of CUDA_VISIBLE_DEVICES, or set resources.device=cpu"
            )
            faults.setdefault("capability", text)
    return list(faults.values())


def version_fault(ours: TorchBuild, theirs: TorchBuild, setting: str, who: str) -> str:
    """A sentence on why two environments cannot share a GPU's memory or an NCCL group; empty where they can, or where
    a version is not known. setting: the one that asks for it, as `weights.sync=ipc`. who: has theirs."""
    pairs = [(ours.version.partition("+")[0], theirs.version.partition("+")[0]), (ours.nccl, theirs.nccl)]
    if all(not a or not b or a == b for a, b in pairs):
        return ""
    return (
        f"{setting} needs one torch and one NCCL on both sides; the trainer has {ours}, {who} {theirs}: make both "
        "environments by ./speedrun.sh and `nanodag sampler install --cuda` of one version of nanodag, or set "
        "weights.sync=disk"
    )
