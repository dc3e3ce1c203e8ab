"""Parents and children: what makes a process end with the one that started it. Standard library only."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

POLL_S = 0.5
STARTER = "NANODAG_STARTER"  # in the environment: the process id of a parent whose end is this process's
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Have this process send itself a signal within a second of its parent's end. parent: its process id, as that one
    may be gone already. A process that keeps the interpreter's lock does not notice: `killed_with_parent`."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        with contextlib.suppress(OSError, ValueError):  # stderr may be a pipe that ended at the parent
            sys.stderr.write(f"the parent process {parent} is gone\n")
            sys.stderr.flush()
        os.kill(os.getpid(), signum)

    threading.Thread(target=watch, daemon=True, name="end_with_parent").start()


def killed_with_parent(parent: int) -> None:
    """Have Linux kill this process when the thread that started it ends; elsewhere a killed parent leaves it alone.

    For the first lines of a fork, as `preexec_fn` too. Do not use it for what a thread of a pool starts."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # which ended before that was asked for
        os._exit(1)


def killed_with_starter() -> None:
    """`killed_with_parent`, for a process that cannot be reached before it is a program of its own: its parent put its
    own id into STARTER. What it starts in turn does not find it."""
    if starter := os.environ.pop(STARTER, ""):
        killed_with_parent(int(starter))


def has_ended(child: "subprocess.Popen[bytes]") -> bool:
    """Whether a child has ended. Where the system can look without fetching the exit code (not macOS), no other process
    or group can have the child's id before that is fetched."""
    if not hasattr(os, "waitid"):
        return child.poll() is not None
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
