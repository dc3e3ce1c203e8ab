"""Provenance of a result: code revision, package versions, machine."""

import functools
import hashlib
import importlib.metadata
import platform
import subprocess
from typing import Any

import psutil

from nanodag import __version__
from nanodag.host.folders import PACKAGE, PROJECT
from nanodag.host.processor import processor_facts, usable_cores

PACKAGES = ("torch", "transformers", "deepspeed", "tokenizers", "rustbpe", "datasets", "lm_eval", "prefect", "numpy")
_CODE_FOLDERS = (PACKAGE, PROJECT / "tasks", PROJECT / "flows")


@functools.cache
def code_revision() -> str:
    """The git commit that this code is at, with `+` and a digest when files differ from it; else the version's."""
    # An installed copy may lie inside somebody else's checkout; only files that git tracks are at its commit.
    commit = _git("rev-parse", "--short=12", "HEAD") if _git("ls-files", "nanodag/__init__.py") else ""
    if not commit:
        return f"nanodag-{__version__}"
    return f"{commit}+{code_digest()}" if _git("status", "--porcelain", "--", *map(str, _CODE_FOLDERS)) else commit


def code_digest() -> str:
    """8 hex digits over the Python files of the project's packages."""
    digest = hashlib.sha256()
    for folder in _CODE_FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder.parent).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def environment(device: str) -> dict[str, Any]:
    """Code revision, Python, platform, cores, device and the versions of the packages that shape results."""
    return {
        "revision": code_revision(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "num_cores": usable_cores(),
        "processor": processor_facts().get("model name") or platform.processor(),
        "device": device,
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(name: str) -> str:
    """The version of an installed package, "" for one that is missing: it must not cost what was trained without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def process_started(process: psutil.Process) -> float:
    """Seconds from the machine's start to the process's. Together with its id it names a process, and unlike the time
    of day it stays the same when the clock is set."""
    return process.create_time() - psutil.boot_time()


def is_alive(pid: int, started: float) -> bool:
    """True when the process of this id that began at `started` (process_started) is there: ids come around again."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process_started(process) - started) < 1.0
    except psutil.NoSuchProcess:
        return False


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PROJECT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
