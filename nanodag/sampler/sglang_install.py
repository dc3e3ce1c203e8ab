"""Makes the environment that SGLang lives in: `nanodag sampler install`. No torch here.

SGLang pins another torch and another transformers than the trainer, so it has a virtual environment of its own, and is
talked to over HTTP. What goes into it stands in `sglang-cpu.txt` (complete, without CUDA: 2.6 GB) or `sglang-cuda.txt`
beside this file. Interrupted, the installation goes on where it was when it is called again; finished, it leaves a
mark, and is not done again until the list changes.
"""

import hashlib
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from nanodag.errors import MissingTool

Device = Literal["cpu", "cuda"]

PYTHON_VARIABLE = "NANODAG_SGLANG_PYTHON"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_TIMEOUT_S = 3.0
MARK = "installed"


def requirements(device: Device) -> Path:
    """The list of what is installed."""
    return Path(__file__).with_name(f"sglang-{device}.txt")


def default_folder(device: Device) -> Path:
    """Where the environment lies unless it is said."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "nanodag" / f"sglang-{device}"


def is_installed(folder: Path, device: Device) -> bool:
    """Whether the environment was finished, from the list as it is now."""
    mark = folder / MARK
    return mark.is_file() and mark.read_text() == _digest(device)


def find_python(configured: str, device: Device) -> Path:
    """The interpreter of SGLang's environment: the one that is configured, else the one that NANODAG_SGLANG_PYTHON
    names, else of the environment that `install` made. Raises MissingTool where there is none."""
    named = os.environ.get(PYTHON_VARIABLE, "") if configured == "auto" else configured
    if named:
        if not Path(named).is_file():
            raise MissingTool(f"There is no interpreter {named}, which sampler.python or {PYTHON_VARIABLE} names.")
        return Path(named)
    folder = default_folder(device)
    if not is_installed(folder, device):
        flag = "--cpu" if device == "cpu" else "--cuda"
        raise MissingTool(
            f"sampler.engine sglang needs SGLang in an environment of its own, and there is none in {folder}. Make it: "
            f"nanodag sampler install {flag}. Or name the interpreter of one that exists: sampler.python, or the "
            f"variable {PYTHON_VARIABLE}."
        )
    return folder / "bin" / "python"


def install(device: Device, folder: Path, say: Callable[[str], None], *, cpu_index: str = CPU_INDEX) -> Path:
    """Make the environment, or finish it; returns its interpreter. Raises MissingTool when a step fails.

    cpu_index: where torch's builds for a CPU are, beside the package index that pip is set to.
    """
    python = folder / "bin" / "python"
    if is_installed(folder, device):
        say(f"It is there already: {python}")
        return python
    if not python.exists():
        say(f"A virtual environment in {folder}")
        _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    listed = requirements(device)
    if device == "cpu":
        say("torch, built for a CPU")
        extra = ["--extra-index-url", cpu_index] if _is_reachable(cpu_index) else []
        _run([*pip, "--no-deps", *extra, _pin_of("torch", listed)])
        say(f"What {listed.name} lists, and nothing else")
        _run([*pip, "--no-deps", "--requirement", str(listed)])
    else:
        say("SGLang and all that it asks for; this takes a while")
        _run([*pip, "--requirement", str(listed)])
    version = _run([str(python), "-c", "import importlib.metadata as m; print(m.version('sglang'))"])
    (folder / MARK).write_text(_digest(device))
    say(f"SGLang {version} is installed: {python}")
    return python


def _digest(device: Device) -> str:
    return hashlib.sha256(requirements(device).read_bytes()).hexdigest() + "\n"


def _pin_of(package: str, listed: Path) -> str:
    return next(line for line in listed.read_text(encoding="utf-8").splitlines() if line.startswith(f"{package}=="))


def _is_reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/", timeout=INDEX_TIMEOUT_S):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def _run(command: Sequence[str]) -> str:
    """Its output. Raises MissingTool with the end of what it said when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = "\n".join(done.stderr.splitlines()[-20:])
        raise MissingTool(f"`{' '.join(command)}` ended with code {done.returncode}; call it again to go on:\n{last}")
    return done.stdout.strip()
