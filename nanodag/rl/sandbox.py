"""Runs Python that a model wrote. No torch here.

With bubblewrap (`bwrap`) the program has no network, a read-only view of the interpreter and of /usr, an empty /tmp and
a process space of its own. Where there is none it is bounded by resource limits only (time, memory of a process, file
size), can read what the user can and reach the network, and a warning says so. There a limit keeps it from starting
processes unless the user is root, whom that limit does not bind; they end with its session, unless they left it. It
sees the standard library, no installed package.
"""

import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

MAX_BYTES = 512 << 20
MAX_OUTPUT_BYTES = 1 << 20

# Sets limits on itself and becomes the program, in one interpreter. Arguments: program, seconds of CPU, bytes of
# memory, bytes of a file.
_LIMITED = """
import resource, sys
path, seconds, memory, size = sys.argv[1], *map(int, sys.argv[2:5])
for which, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
                     (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_NPROC, 1)):
    resource.setrlimit(which, (limit, limit))
sys.argv[:] = [path]
with open(path, encoding="utf-8") as source:
    code = compile(source.read(), path, "exec")
del resource, which, limit, seconds, memory, size, source
exec(code, {"__name__": "__main__", "__builtins__": __builtins__})
"""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a program left. returncode: negative for a signal. timed_out: it was ended at the time limit. stdout and
    stderr: what they held at the end, at most MAX_OUTPUT_BYTES each."""

    stdout: str
    stderr: str
    returncode: int
    timed_out: bool


def run_python(program: str, *, stdin: str = "", timeout_s: float, max_bytes: int = MAX_BYTES) -> Finished:
    """Run a program to its end, or for timeout_s seconds. max_bytes: its address space."""
    with tempfile.TemporaryDirectory(prefix="nanodag-sandbox-") as name:
        folder = Path(name)
        (folder / "inside").mkdir()
        source = folder / "inside" / "program.py"
        source.write_text(program, encoding="utf-8", errors="replace")
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        limits = [str(math.ceil(timeout_s) + 1), str(max_bytes), str(MAX_OUTPUT_BYTES)]
        with (
            (folder / "stdin").open("rb") as given,
            (folder / "stdout").open("wb") as out,  # files, not pipes: the limit of file sizes bounds them
            (folder / "stderr").open("wb") as error,
        ):
            process = subprocess.Popen(
                [*_command(source), *limits],
                stdin=given,
                stdout=out,
                stderr=error,
                cwd=source.parent,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
            timed_out = _wait(process, timeout_s)
        stdout, stderr = (_text(folder / stream) for stream in ("stdout", "stderr"))
        return Finished(stdout, stderr, process.returncode, timed_out)


@cache
def bubblewrap() -> str | None:
    """The path of a bubblewrap that works here; None, after a warning, where there is none."""
    found = shutil.which("bwrap")
    if found is not None:
        tried = subprocess.run([found, *_walls(), "true"], capture_output=True, timeout=30, check=False)
        if tried.returncode == 0:
            return found
        why = f"{found} does not work here: {tried.stderr.decode(errors='replace').strip()[:200]}"
    else:
        why = "bubblewrap (bwrap) is not installed"
    log.warning(
        "Programs that the model writes run with resource limits only, as this user, with its files and its network: "
        "%s. Install it, or train in a container that holds nothing of value.",
        why,
    )
    return None


def _command(source: Path) -> list[str]:
    """Up to the program's path. -S: no installed packages; -P: nothing of the working directory is imported first."""
    wrapped, python = bubblewrap(), os.path.realpath(sys.executable)
    path = str(source)
    walls: list[str] = []
    if wrapped is not None:
        path = f"/inside/{source.name}"
        walls = [wrapped, *_walls(), "--ro-bind", str(source.parent), "/inside", "--chdir", "/tmp"]
    return [*walls, python, "-S", "-s", "-P", "-B", "-c", _LIMITED, path]


def _walls() -> list[str]:
    folders = ["/usr", "/bin", "/lib", "/lib64", sys.base_prefix]
    binds = [part for folder in folders for part in ("--ro-bind-try", folder, folder)]
    return ["--tmpfs", "/tmp", *binds, "--proc", "/proc", "--dev", "/dev", "--unshare-all", "--die-with-parent"]


def _wait(process: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    """Wait for the end; True when it had to be ended. What it started in its session ends with it."""
    deadline = time.monotonic() + timeout_s
    try:
        process.wait(timeout=max(0.0, deadline - time.monotonic()))
        timed_out = False
    except subprocess.TimeoutExpired:
        timed_out = True
    with suppress(ProcessLookupError):  # nothing may be left of the session
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return timed_out


def _text(path: Path) -> str:
    with path.open("rb") as stream:
        return stream.read(MAX_OUTPUT_BYTES).decode("utf-8", errors="replace")
