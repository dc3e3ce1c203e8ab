"""The environment that SGLang lives in: `nanodag sampler install`. No torch here.

SGLang pins another torch and another transformers than the trainer, so it has an environment of its own
(nanodag.external_envs). What goes into it stands in `sglang-cpu.txt` (complete, without CUDA: 3.2 GB) or
`sglang-cuda.txt` beside this file.
"""

import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal

from nanodag.external_envs.package_environment import PackageEnvironment, Say, silent

Device = Literal["cpu", "cuda"]

PYTHON_VARIABLE = "NANODAG_SGLANG_PYTHON"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_TIMEOUT_S = 3.0


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
    if made.begin(folder, say) is None:
        return folder / "bin" / "python"
    listed, pins = str(made.listed), made.pins
    if device == "cpu":
        say("torch, built for a CPU")
        extra = ["--extra-index-url", cpu_index] if _is_reachable(cpu_index) else []
        torch = next(pin for pin in pins if pin.startswith("torch=="))
        made.pip(folder, ["--no-deps", *extra, torch], 1, show)
        say(f"The {len(pins)} packages of {made.listed.name}, and nothing else")
        made.pip(folder, ["--no-deps", "--requirement", listed], len(pins), show)
    else:
        say("SGLang and all that it asks for: some 11 GB")
        made.pip(folder, ["--requirement", listed], 0, show)
    return made.finish(folder, say)


def _is_reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/", timeout=INDEX_TIMEOUT_S):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False
