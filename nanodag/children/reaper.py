"""Programs that leave no process behind. Standard library only.

A program that starts others calls `keep` in its first lines. It goes on in a fork, and the process itself, the reaper,
waits for that one's end. Then it ends what is left below it (on Linux, which hands it all orphans).
"""

import os
import resource
import signal
import threading
import time

from nanodag.children.tree import POLL_S, adopt_orphans, kill_children, killed_with_parent, send

KILL = signal.SIGUSR1
SWEEP_S = 0.01
MAX_SWEEPS = 500


def keep(parent: int) -> None:
    """Return in a fork, and end this process with it: with its exit code, or by the signal that ended it.

    parent: of this process; the fork is killed soon after its end. SIGTERM is passed on to the fork, and KILL kills it.
    Start this process in a session of its own: who kills a group leaves it the time to end the others. Call it before
    threads are started."""
    adopt_orphans()
    # The fork may be seen, and a signal come, before there are handlers: that would end this process alone.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, KILL})
    me, fork = os.getpid(), os.fork()
    if fork == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        killed_with_parent(me)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda signum, frame: send(fork, signal.SIGTERM))
    signal.signal(KILL, lambda signum, frame: send(fork, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    threading.Thread(target=_end_with, args=(parent, fork), daemon=True).start()
    ended, status = os.wait()
    while ended != fork:  # an orphan
        ended, status = os.wait()
    for number in (signal.SIGTERM, KILL):
        signal.signal(number, signal.SIG_IGN)
    for _ in range(MAX_SWEEPS):
        if not kill_children():
            break
        time.sleep(SWEEP_S)
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
    send(fork, signal.SIGKILL)
