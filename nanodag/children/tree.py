"""Processes below one: who they are, their memory, who inherits their orphans, and how they end. Standard library only.

A program that starts others calls `keep` in its first lines, and leaves no process behind. It goes on in a fork, and
the process itself, the reaper, waits for that one's end. Then it ends what is left below it: Linux hands it all
orphans.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
POLL_S = 0.5
PEAK_EVERY_S = 0.5
PEAK_SHARE_OF_TIME = 0.02
"""The most of the time that looking may take: of processes of a hundred gigabytes it takes a good part of a second."""
STARTER = "NANODAG_STARTER"  # in the environment: the process id of a parent whose end is this process's
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
KILL = signal.SIGUSR1
SWEEP_S = 0.01
MAX_SWEEPS = 500


def descendants(pid: int) -> Iterator[int]:
    """The processes below one, as the kernel lists them; none where it does not."""
    waiting = [pid]
    while waiting:
        for child in children_of(waiting.pop()):
            yield child
            waiting.append(child)


def children_of(pid: int) -> list[int]:
    """The children of a process, of all its threads; none where the system does not list them, or it has ended."""
    children: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return children


def private_bytes(pid: int) -> int:
    """Memory of a process that it does not share with a file or another; 0 when it has ended."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * PAGE_BYTES


def proportional_bytes(pid: int) -> int:
    """Memory of a process, shared pages by their share (PSS); 0 of one that has ended or is another user's."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


class MemoryPeak:
    """The most memory that the processes below this one ever took together, by looking now and then: a peak between two
    looks is missed. Shared pages count by their share, so ranks that map the same libraries do not count them twice.

    Call `look` as often as there is time. highest: bytes; 0 where /proc does not tell."""

    def __init__(self) -> None:
        self.highest = 0
        self._next = 0.0

    def look(self) -> None:
        """Add up what all descendants take now, unless the last look was a moment ago."""
        began = time.monotonic()
        if began < self._next:
            return
        self.highest = max(self.highest, sum(map(proportional_bytes, descendants(os.getpid()))))
        took = time.monotonic() - began
        self._next = began + max(PEAK_EVERY_S, took / PEAK_SHARE_OF_TIME)


def adopt_orphans() -> None:
    """Have Linux hand this process whatever its descendants leave behind, also what took a session of its own."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_children(but: Collection[int] = ()) -> bool:
    """Kill the children of this process, but for some, and take the exit codes of those that have ended. True where
    there were any: their own are its children then, so it is called again."""
    left = [pid for pid in children_of(os.getpid()) if pid not in but]
    for pid in left:
        send(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return bool(left)


def send(pid: int, signum: int) -> None:
    """Send a signal to a process, which may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def end_with_parent(parent: int, signum: signal.Signals = signal.SIGKILL, pid: int | None = None) -> None:
    """Have this process send itself, or a child, a signal within a second of its parent's end. parent: its process id,
    as that one may be gone already. A process that keeps the interpreter's lock does not notice: `killed_with_parent`.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        with suppress(OSError, ValueError):  # stderr may be a pipe that ended at the parent
            sys.stderr.write(f"the parent process {parent} is gone\n")
            sys.stderr.flush()
        send(pid or os.getpid(), signum)

    threading.Thread(target=watch, daemon=True, name="end_with_parent").start()


def killed_with_parent(parent: int) -> None:
    """Have Linux kill this process when the thread that started it ends.

    For the first lines of a fork, as `preexec_fn` too. Do not use it for what a thread of a pool starts."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # which ended before that was asked for
        os._exit(1)


def killed_with_starter() -> None:
    """`killed_with_parent`, for a process that cannot be reached before it is a program of its own: its parent put its
    own id into STARTER. What it starts in turn does not find it."""
    if starter := os.environ.pop(STARTER, ""):
        killed_with_parent(int(starter))


def has_ended(child: "subprocess.Popen[bytes]") -> bool:
    """True once a child has ended. Its exit code is left: no other process or group can have its id before that is
    fetched."""
    if child.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another thread has just fetched it
        return child.poll() is not None


def how_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was ended by {name}" + (" (its limit of CPU time)" if name == "SIGXCPU" else "")


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
    end_with_parent(parent, pid=fork)
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
