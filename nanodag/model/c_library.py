"""Builds our C code with the machine's compiler, at first use, keeps it in the user's cache folder, and runs it on as
many threads as torch uses: a call through ctypes lets other threads run.

What is built for one kind of processor stays apart from what is built for another.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nanodag.errors import MissingTool
from nanodag.host.folders import cache_folder
from nanodag.host.processor import processor_facts

HEADERS = Path(__file__).parent
DTYPES = (torch.float32, torch.bfloat16)  # that our code for training takes
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
BUILD_TIMEOUT_S = 1200  # it takes 7 CPU-seconds, and minutes where many wait for few cores


def c_library(source: Path, what: str, functions: Mapping[str, tuple[Any, Any]]) -> ctypes.CDLL:
    """The shared library of a C file, built now or found. what: for errors. functions: types of arguments and result.

    Raises MissingTool where no C compiler builds it."""
    named = os.environ.get("CC", "cc")
    compiler = shutil.which(named)
    if compiler is None:
        raise MissingTool(
            f"There is no C compiler {named}, which builds {what}. Install gcc or clang, or name one in CC."
        )
    try:
        library = ctypes.CDLL(str(_built(source, compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = str(getattr(error, "stderr", None) or error).strip()
        raise MissingTool(f"{compiler} (CC, else cc) does not build {what}: {detail}") from error
    for name, (arguments, returned) in functions.items():
        getattr(library, name).argtypes, getattr(library, name).restype = arguments, returned
    return library


def _built(source: Path, compiler: str) -> Path:
    """The shared library, made now or found. Two processes may build it at once: each renames its own into place."""
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(HEADERS.glob("*.h")))]
    facts = processor_facts()  # `-march=native` looks at them: a home folder may be shared by machines of several kinds
    fields = [f"{name}: {facts[name]}" for name in ("model name", "flags", "Features", "CPU part") if name in facts]
    processor = "\n".join(fields) or platform.platform() + platform.processor()
    identity = "\0".join([*texts, compiler, *FLAGS, processor])
    path = cache_folder() / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *FLAGS, f"-I{HEADERS}", str(source), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
            made.replace(path)
    return path


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of a ctypes structure, all of one type."""
    return [(name, kind) for name in names.split()]


def on_threads(work: Callable[[int, int], None]) -> None:
    """Call work(thread, num_threads) once for each of torch's threads, at the same time."""
    count = torch.get_num_threads()
    if count == 1:
        work(0, 1)
    else:
        list(_pool(count).map(work, range(count), [count] * count))


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="core")
