"""Runs one command and makes sure that it does not outlive whoever asked for it.

`python -m nanodag.worker.watchdog FD USAGE NICENESS COMMAND...`: FD is the read end of a pipe whose write end only the
asking process holds. When that end closes (the asker ended, by SIGKILL too) the command's whole process group is ended:
SIGTERM, then SIGKILL after the seconds in the environment's STOP_TIMEOUT. One line of JSON with what the command took
is appended to the file USAGE. Exits with the command's code, or 128 + signal.
"""

import contextlib
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nanodag.children.child import start_child
from nanodag.children.tree import PEAK_EVERY_S, MemoryPeak, adopt_orphans, children_of, has_ended, killed_with_parent

STOP_TIMEOUT = "NANODAG_STOP_TIMEOUT_S"
STOP_TIMEOUT_S = 20.0  # where it is not set

Child = subprocess.Popen[bytes]


def main() -> int:
    descriptor, usage_path, niceness, command = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    began = time.time()
    child_ended, wake_up = os.pipe()
    os.set_blocking(wake_up, False)
    signal.set_wakeup_fd(wake_up)
    stop_asked: list[int] = []
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda signum, frame: stop_asked.append(signum))
    adopt_orphans()
    # A session of its own: signals for the terminal's group (Ctrl-C) reach the asker alone, who decides.
    begin = partial(killed_with_parent, os.getpid())
    child = start_child(command, stdin=None, stdout=None, preexec_fn=begin).process
    if niceness:
        os.setpriority(os.PRIO_PROCESS, child.pid, niceness)
    selector = selectors.DefaultSelector()
    for readable in (descriptor, child_ended):
        # select() may name a pipe that has nothing after all; a read that then waits would miss the asker's end.
        os.set_blocking(readable, False)
        selector.register(readable, selectors.EVENT_READ)
    asker_ended, memory = False, MemoryPeak()
    while not has_ended(child) and not asker_ended and not stop_asked:
        for key, _ in selector.select(timeout=PEAK_EVERY_S):
            with contextlib.suppress(BlockingIOError):
                if os.read(key.fd, 64) == b"":
                    asker_ended = asker_ended or key.fd == descriptor
                    selector.unregister(key.fd)  # an end that has been seen would be seen for ever
        memory.look()
    end_group(child, float(os.environ.get(STOP_TIMEOUT, STOP_TIMEOUT_S)))  # the command, or what it left behind
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024
    line = {
        "began": round(began, 3),
        "seconds": round(time.time() - began, 3),
        "cpu_s": round(used.ru_utime + used.ru_stime, 3),
        "peak_bytes": max(memory.highest, used.ru_maxrss * unit),
        "code": child.returncode,
    }
    with usage_path.open("a", encoding="utf-8") as stream:
        stream.write("\n" + json.dumps(line) + "\n")  # behind a line that a full disk cut
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def end_group(child: Child, grace_s: float) -> None:
    """End every process of the child's group, then what it left in other groups: SIGTERM, SIGKILL after grace_s."""
    _end(partial(os.killpg, child.pid), child, grace_s)
    for orphan in children_of(os.getpid()):
        _end(partial(os.kill, orphan), child, grace_s)


def _end(send: Callable[[int], None], child: Child, grace_s: float) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace_s
        try:
            send(signum)
            while time.monotonic() < deadline:
                _reap(child)
                send(0)
                time.sleep(0.02)
        except ProcessLookupError:
            child.poll()
            return


def _reap(child: Child) -> None:
    """Take the exit codes of the child and, once it has ended, of its orphans: a zombie would count as alive."""
    if child.poll() is not None:  # before that, waiting for any process could steal the child's own exit code
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    sys.exit(main())
