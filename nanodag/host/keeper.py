"""Programs that leave no process behind. Standard library only.

A program that starts others calls `keep` in its first lines. It goes on in a fork, and the process itself, the keeper,
waits for that one's end. Then it ends what is left below it (on Linux, which hands it all orphans).
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from contextlib import suppress

from nanodag.host.below import children_of
from nanodag.host.parent import POLL_S, killed_with_parent

KILL = signal.SIGUSR1
SWEEP_S = 0.01
MAX_SWEEPS = 500
_PR_SET_CHILD_SUBREAPER = 36


def keep(parent: int) -> None:
    """Return in a fork, and end this process with it: with its exit code, or by the signal that ended it.

    parent: of this process; the fork is killed soon after its end. SIGTERM is passed on to the fork, and KILL kills it.
    Start this process in a session of its own: who kills a group leaves it the time to end the others. Call it before
    threads are started."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    me, fork = os.getpid(), os.fork()
    if fork == 0:
        killed_with_parent(me)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda signum, frame: _send(fork, signal.SIGTERM))
    signal.signal(KILL, lambda signum, frame: _send(fork, signal.SIGKILL))
    threading.Thread(target=_end_with, args=(parent, fork), daemon=True).start()
    ended, status = os.wait()
    while ended != fork:  # an orphan
        ended, status = os.wait()
    for number in (signal.SIGTERM, KILL):
        signal.signal(number, signal.SIG_IGN)
    _end_all()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(me, -code)
    os._exit(code)


def _end_with(parent: int, fork: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    _send(fork, signal.SIGKILL)


def _end_all() -> None:
    """Kill the children of this process, and theirs, which then are its own."""
    for _ in range(MAX_SWEEPS):
        left = children_of(os.getpid())
        if not left:
            return
        for pid in left:
            _send(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(SWEEP_S)


def _send(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)
