"""The processes that a stage starts, watched: when one ends unasked, all end, and the reason is known. No torch."""

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from nanodag.children.child import Child, start_child
from nanodag.children.tree import how_ended
from nanodag.errors import StageFailed

POLL_S = 0.2
GRACE_S = 10.0
MOMENT_S = 0.5
CONNECTION_LOST = 255  # ssh's code, for a child on another machine


class Children:
    """Child processes by name. A thread looks at them; the first that ends before `release` makes it end the others, so
    that whoever waits for one of them hears of it, and `check` says why.

    is_stopping: true once a stop signal came. It goes to the whole process group, so children may end by it.
    """

    def __init__(self, *, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self._is_stopping = is_stopping
        self._processes: dict[str, Child] = {}
        self._released = threading.Event()
        self._lock = threading.Lock()
        self.failure: StageFailed | None = None
        self.killed: StageFailed | None = None
        self.exit_code = 1

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start a process; it writes to this process's log."""
        process = start_child(command, environment=environment, in_group=True)
        self.add(name, process)
        return process

    def add(self, name: str, process: Child) -> None:
        with self._lock:
            first = not self._processes
            self._processes[name] = process
        if first:
            threading.Thread(target=self._watch, daemon=True).start()

    def check(self) -> None:
        """Raise StageFailed when a child has ended unasked."""
        if self.failure is not None:
            raise self.failure

    def cause_of(self, error: Exception) -> Exception:
        """The failure behind an error that this process met: that of a child which a signal ended, else the error.

        The broken connection may be seen a moment before the process counts as ended, so this waits that moment.
        """
        deadline = time.monotonic() + MOMENT_S
        while self.killed is None and time.monotonic() < deadline:
            self._look()
            time.sleep(0.01)
        return self.killed or error

    def release(self) -> None:
        """From now on children may end."""
        self._released.set()

    def end(self) -> None:
        """Wait for the children to end by themselves for a while, then kill what is left."""
        self.release()
        deadline = time.monotonic() + GRACE_S
        for process in self._processes.values():
            process.wait(deadline - time.monotonic())
        self.kill()

    def kill(self) -> None:
        self.release()
        for process in self._processes.values():
            process.kill()

    def abandon(self) -> None:
        """Kill all, wait for none and take no lock: for a signal's handler, which may have interrupted who holds it."""
        for process in list(self._processes.values()):  # a thread may be starting one
            process.send(signal.SIGKILL)

    def _watch(self) -> None:
        while not self._released.wait(POLL_S):
            if self._look():
                self.kill()
                return

    def _look(self) -> bool:
        """Note the first child that has ended unasked; True when there is one."""
        with self._lock:
            ended = [(name, p) for name, p in self._processes.items() if not p.is_alive]
            if not ended or self._released.is_set() or self._is_stopping():
                return self.failure is not None
            # One that a signal ended, or that lies beyond a lost connection, comes first.
            ended.sort(key=lambda item: (item[1].code != CONNECTION_LOST, not _signal_of(item[1].code)))
            name, process = ended[0]
            failure = StageFailed(f"{name} (pid {process.pid}) {_how(process.code)}.")
            self.failure = self.failure or failure
            if number := _signal_of(process.code):
                self.killed = self.killed or failure
                self.exit_code = 128 + number
            return True


def _signal_of(code: int) -> int:
    """The signal that ended a child, here or under the watchdog of another machine; 0 for none. What lies beyond a lost
    connection counts as killed."""
    if code == CONNECTION_LOST:
        return signal.SIGKILL
    return -code if code < 0 else max(0, code - 128)


def _how(code: int) -> str:
    if code == CONNECTION_LOST:
        return "lost its connection"
    if not (number := _signal_of(code)):
        return f"ended with code {code}; its own lines above say why"
    return how_ended(-number) + (" (often: out of memory)" if number == signal.SIGKILL else "")


def ignore_stop_signals() -> None:
    """For a child: the stop signal reaches the whole process group, and the parent decides when a stage stops."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
