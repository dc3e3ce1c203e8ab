"""A supervised child process: started, spoken to in JSON lines, and ended with all of its session. No torch here."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from nanodag.children.tree import has_ended, how_ended, send

LOOK_S = 0.02
STOP_TIMEOUT_S = 5.0
TAIL_LINES = 20
BLOCK = 1 << 16


class Lines:
    """JSON over a socket, a line each."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._rest = connection, b""

    def say(self, message: Any, default: Callable[[Any], Any] | None = None) -> None:
        """Send a message. Raises OSError where the other side is gone. default: as of `json.dumps`."""
        self.socket.sendall(json.dumps(message, default=default).encode() + b"\n")

    def hear(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises TimeoutError, or another OSError where the other side has closed or is gone."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            self.socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
            if not (block := self.socket.recv(BLOCK)):
                raise ConnectionResetError("it has ended")
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def has_more(self, *, within_s: float) -> bool:
        """True where `hear` has something to begin with: from the line before, or within that time; the end, too."""
        if self._rest:
            return True
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(1000 * within_s))


class Child:
    """A child process. It ends with this object's context, or by `kill`, `stop` or `hang_up`.

    log_path: where its output goes, "" for elsewhere. in_group: it is in this process's session; else all of its own
    session ends with it. line: what `ask` speaks to it over.

    Its exit code is fetched only when it is ended: until then its number, and its group's, is no other's.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        *,
        log_path: Path | str = "",
        in_group: bool = False,
        line: Lines | None = None,
    ) -> None:
        self.process, self.log_path, self.line = process, Path(log_path), line
        self._in_group, self._ending = in_group, threading.Lock()

    def tell(self, said: bytes, *, is_all: bool = True) -> None:
        """Write to its standard input, which ends with that if it is_all. Nothing happens where it has ended."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            view = memoryview(said)
            while view:
                view = view[self.process.stdin.write(view) or 0 :]
        if is_all:
            self.process.stdin.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return not has_ended(self.process)

    @property
    def code(self) -> int:
        """Its exit code, negative for a signal, once it has ended; what it left in its session is ended."""
        self.kill()
        return self.process.returncode

    def how_ended(self) -> str:
        """Its end in words."""
        return how_ended(self.code)

    def tail(self, num_lines: int = TAIL_LINES) -> str:
        """The last lines of its log, for a message."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines() if self.log_path.name else []
        return "\n".join(lines[-num_lines:])

    def send(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.process.returncode is None:
            send(self.pid, signum)

    def wait(self, timeout_s: float) -> bool:
        """True when it has ended, within this time; heard of at once where the kernel can say it (Linux 5.3)."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive and (left_s := deadline - time.monotonic()) > 0:
            try:
                handle = os.pidfd_open(self.pid)
            except (OSError, AttributeError):
                time.sleep(min(LOOK_S, left_s))
            else:
                ends = select.poll()
                ends.register(handle, select.POLLIN)
                ends.poll(left_s * 1000)
                os.close(handle)
        return not self.is_alive

    def stop(self, timeout_s: float = STOP_TIMEOUT_S, signum: int = signal.SIGTERM) -> None:
        """Ask it to end by a signal, and kill it after this time."""
        self.send(signum)
        self.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill it and its session, and wait for its end. Nothing happens where that was done."""
        with self._ending:  # its number is nobody else's until its exit code is fetched
            if self.process.returncode is None:
                with suppress(ProcessLookupError):
                    (os.kill if self._in_group else os.killpg)(self.pid, signal.SIGKILL)
                self.process.wait()
        if self.line is not None:
            self.line.socket.close()

    def hang_up(self, timeout_s: float) -> None:
        """Close the line and its standard input, and kill it where it does not end by that within this time."""
        for end in (self.line.socket if self.line is not None else None, self.process.stdin):
            if end is not None:
                end.close()
        self.wait(timeout_s)
        self.kill()

    def ask(self, message: Any, timeout_s: float) -> Any:
        """Its answer to a line of JSON. Raises as `Lines.hear`."""
        deadline = time.monotonic() + timeout_s
        assert self.line is not None
        self.line.socket.settimeout(timeout_s)
        self.line.say(message, default=str)
        return self.line.hear(deadline - time.monotonic())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()


def start_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    given: bytes | None = None,
    is_all: bool = True,
    log_path: Path | str = "",
    has_line: bool = False,
    in_group: bool = False,
    files: Sequence[int] = (),
    **how: Any,
) -> Child:
    """Start a command.

    environment: None for this process's. given: bytes on its standard input, which then ends if that is_all.
    log_path: its output is appended there; "" for this process's standard error. has_line: a socket's number is its
    last argument, over which `ask` speaks to it. in_group: it stays in this process's group and session. how:
    further arguments of subprocess.Popen.
    """
    ours, theirs = socket.socketpair() if has_line else (None, None)
    if theirs is not None:
        command, files = [*command, str(theirs.fileno())], (*files, theirs.fileno())
    log = Path(log_path).open("ab") if log_path else None  # noqa: SIM115 - closed below
    streams = {
        "stdin": subprocess.DEVNULL if given is None else subprocess.PIPE,
        "stdout": sys.stderr if log is None else log,
        "stderr": log,
    }
    try:
        process = subprocess.Popen(
            list(command),
            env=None if environment is None else dict(environment),
            pass_fds=files,
            start_new_session=not in_group,
            bufsize=0,
            **{**streams, **how},
        )
    finally:
        for end in (theirs, log):
            if end is not None:
                end.close()
    child = Child(process, log_path=log_path, in_group=in_group, line=None if ours is None else Lines(ours))
    if given is not None:
        child.tell(given, is_all=is_all)
    return child
