"""Makes the environment that SGLang lives in: `nanodag sampler install`. No torch here.

SGLang pins another torch and another transformers than the trainer, so it has a virtual environment of its own, and is
talked to over HTTP. What goes into it stands in `sglang-cpu.txt` (complete, without CUDA: 3.2 GB) or `sglang-cuda.txt`
beside this file. Interrupted, the installation goes on where it was when it is called again; finished, it leaves a
mark, and is not done again until the list changes. What pip says goes to `install.log` in the environment's folder.
"""

import hashlib
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from nanodag.errors import MissingTool
from nanodag.errors.words import duration, size

Device = Literal["cpu", "cuda"]

PYTHON_VARIABLE = "NANODAG_SGLANG_PYTHON"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_TIMEOUT_S = 3.0
MARK = "installed"
LOG_NAME = "install.log"
UNPACKED = "lib/python*/site-packages/*.dist-info"
LOOK_EVERY_S = 0.5
TAIL_LINES = 20
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


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


def install(
    device: Device,
    folder: Path,
    say: Callable[[str], None],
    *,
    show: Callable[[str], None] = lambda text: None,
    cpu_index: str = CPU_INDEX,
) -> Path:
    """Make the environment, or finish it; returns its interpreter. Raises MissingTool when a step fails.

    say gets what is begun and done, show twice a second how far it is. cpu_index: where torch's builds for a CPU are,
    beside the package index that pip is set to.
    """
    python = folder / "bin" / "python"
    if is_installed(folder, device):
        say(f"It is there already: {python}")
        return python
    if not python.exists():
        say(f"A virtual environment in {folder}")
        _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "--no-color"]
    listed, log_path = requirements(device), folder / LOG_NAME
    say(f"What pip says goes to {log_path}")
    if device == "cpu":
        say("torch, built for a CPU")
        extra = ["--extra-index-url", cpu_index] if _is_reachable(cpu_index) else []
        _watched([*pip, "--no-deps", *extra, _pin_of("torch", listed)], log_path, 1, show)
        num_packages = len(_pins(listed))
        say(f"The {num_packages} packages of {listed.name}, and nothing else")
        _watched([*pip, "--no-deps", "--requirement", str(listed)], log_path, num_packages, show)
    else:
        say("SGLang and all that it asks for: some 11 GB")
        _watched([*pip, "--requirement", str(listed)], log_path, 0, show)
    version = _run([str(python), "-c", "import importlib.metadata as m; print(m.version('sglang'))"])
    (folder / MARK).write_text(_digest(device))
    say(f"SGLang {version} is installed: {python}")
    return python


def _digest(device: Device) -> str:
    return hashlib.sha256(requirements(device).read_bytes()).hexdigest() + "\n"


def _pins(listed: Path) -> list[str]:
    return [line for line in listed.read_text(encoding="utf-8").splitlines() if "==" in line and line[0] != "#"]


def _pin_of(package: str, listed: Path) -> str:
    return next(pin for pin in _pins(listed) if pin.startswith(f"{package}=="))


def _is_reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/", timeout=INDEX_TIMEOUT_S):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def progress_of(lines: Sequence[str], total: int, num_unpacked: int = 0) -> str:
    """How far pip is by what it has said: `package 3 of 146: numpy, 21.5 MB downloaded`. total: 0 where nobody knows
    beforehand how many packages there are. num_unpacked: of those that are fetched and those that were there."""
    packages = [match[1] or match[2] for line in lines if (match := _PACKAGE.match(line))]
    of = f" of {total}" if total else ""
    num_bytes = sum(float(match[1]) * UNITS[match[2]] for line in lines if (match := _DOWNLOAD.match(line)))
    loaded = f"{size(num_bytes)} downloaded" if num_bytes else "nothing to download"
    if any(line.startswith("Installing collected packages") for line in lines):
        return f"{num_unpacked} of {max(total, len(packages))} packages unpacked, {loaded}"
    loaded += "" if num_bytes else " so far"
    return f"package {len(packages)}{of}: {packages[-1]}, {loaded}" if packages else "asking the package index"


# from an index, as it is there already, or from a folder of wheels
_PACKAGE = re.compile(r"(?:Collecting|Requirement already satisfied:) ([\w.-]+)|Processing [^(]*/([\w.-]+?)-\d")
_DOWNLOAD = re.compile(r"\s*Downloading .*\(([0-9.]+) (kB|MB|GB)\)")


def _watched(command: Sequence[str], log_path: Path, total: int, show: Callable[[str], None]) -> None:
    """Run pip with its output in a file, and show how far it is. Raises MissingTool with the file's end when it fails.

    total: how many packages it is asked for; 0 for unknown.
    """
    began = time.monotonic()
    with log_path.open("ab") as log_stream:
        before = log_stream.tell()
        log_stream.write(f"$ {' '.join(command)}\n".encode())
        log_stream.flush()
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log_stream, stderr=subprocess.STDOUT
        ) as process:
            try:
                while process.poll() is None:
                    unpacked = [
                        p for p in log_path.parent.glob(UNPACKED) if not p.name.startswith(("pip-", "setuptools-"))
                    ]
                    how_far = progress_of(_lines(log_path, before), total, len(unpacked))
                    show(f"{how_far}, {duration(time.monotonic() - began)}")
                    time.sleep(LOOK_EVERY_S)
            except BaseException:
                process.terminate()  # Ctrl-C reaches it anyway; what is half unpacked, pip removes
                raise
    if process.returncode != 0:
        last = "\n".join(f"  {line}" for line in _lines(log_path, before)[-TAIL_LINES:])
        raise MissingTool(
            f"pip ended with code {process.returncode} after {duration(time.monotonic() - began)}; call the command "
            f"again to go on. The end of {log_path}:\n{last}"
        )


def _lines(path: Path, offset: int) -> list[str]:
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read().decode(errors="replace").splitlines()


def _run(command: Sequence[str]) -> str:
    """Its output. Raises MissingTool with the end of what it said when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = "\n".join(done.stderr.splitlines()[-20:])
        raise MissingTool(f"`{' '.join(command)}` ended with code {done.returncode}; call it again to go on:\n{last}")
    return done.stdout.strip()
