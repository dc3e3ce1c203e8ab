"""An interpreter that makes an object once, and has a fork of itself serve each request. Standard library only.

`python -m nanodag.children.fork_server CONTROL`, or this file's path where the interpreter has no nanodag. CONTROL: a
Unix stream socket. Standard input has JSON: `maker` (`module:function`), `given`, its arguments, and `limits`
(nanodag.children.forks.ForkLimits). The maker returns what is told of the object and what serves a `Line`. It answers
one line, `{"about"}` or `{"error"}`. Each byte on CONTROL then brings a socket, over which a fork is spoken to. When
the other end of that is closed, the fork ends; when CONTROL is closed, all do, and this process.

A fork has a session of its own and limits on CPU time, address space and files. Its processes, and their memory
together, are looked at every WATCH_S seconds. Nothing of it is left when it has ended: processes that lost
their parent become children of the fork, later of this process. The last line on its socket is `{"ended", "is_lost",
"printed"}`: why it ended, whether somebody else has killed it, and the last that it printed.
"""

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

IS_FOREIGN = not __package__
if IS_FOREIGN:
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # where nanodag is, in the place of this file's folder
from nanodag.children import tree  # noqa: E402
from nanodag.own_code.user_frame import with_place  # noqa: E402

START_TIMEOUT_S = 120.0
WATCH_S = 0.2
END_TIMEOUT_S = 5.0
TAIL_BYTES = 2000


class Line:
    """JSON lines to and from who asked for a fork."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lines = connection, connection.makefile("rb")

    def __iter__(self) -> Iterator[Any]:
        """Messages, until the other end is closed."""
        return map(json.loads, self._lines)

    def send(self, work: Callable[[], Any]) -> None:
        """Send what a call returns. What raises, and what is no JSON, is sent as `{"error"}`. Raises OSError where the
        connection is closed."""
        try:
            reply = json.dumps(work(), allow_nan=False)
        except BaseException as error:  # noqa: BLE001 - also what sys.exit raises: it ends with the reason
            reply = json.dumps({"error": with_place(error)})
        self._connection.sendall(reply.encode() + b"\n")


def answering(answer: Callable[[Any], Any]) -> Callable[[Line], None]:
    """Serve a line by an answer to each message."""

    def serve(line: Line) -> None:
        for message in line:
            line.send(partial(answer, message))

    return serve


def main() -> None:
    """Serve until CONTROL is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    job = json.load(sys.stdin)  # anybody on the machine may read a command line
    pid = os.getpid()
    tree.adopt_orphans()
    signal.setitimer(signal.ITIMER_REAL, START_TIMEOUT_S)  # the kernel ends an import that hangs when nobody waits
    serve = None
    try:
        module, _, name = job["maker"].partition(":")
        maker = getattr(import_module(module), name)
        if IS_FOREIGN:
            del sys.path[0]
        about, serve = maker(**job["given"])
        reply = json.dumps({"about": about}, allow_nan=False)
    except BaseException as error:  # noqa: BLE001 - whatever a module raises when it is imported
        reply = json.dumps({"error": with_place(error)})
    if os.getpid() != pid:  # it forked, and this is the copy
        os._exit(1)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    gc.freeze()  # a collection in a fork would copy every page
    server = _Forks(control, serve, job["limits"])
    with suppress(OSError):  # whoever asked is gone, which `run` sees
        control.sendall(reply.encode() + b"\n")
    server.run()


@dataclass(slots=True)
class _Fork:
    """A fork that runs. connection: its end of the socket. output: what it prints. reason: why it was ended."""

    pid: int
    connection: socket.socket
    output: int
    tail: bytes = b""
    num_shown: int = 0
    reason: str = ""


class _Forks:
    """Forks, and ends them with all that they have started."""

    def __init__(self, control: socket.socket, serve: Any, limits: Mapping[str, int]) -> None:
        self._control, self._serve, self._limits = control, serve, limits
        self._forks: dict[int, _Fork] = {}  # by process
        self._by_file: dict[int, _Fork] = {}
        self._kept = set(tree.children_of(os.getpid()))  # which were started when the object was made
        self._has_strays = False
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> None:
        """Serve until whoever asks is gone."""
        looked = time.monotonic()
        while self._serve_once():
            self._reap()
            if self._forks and time.monotonic() - looked > WATCH_S:
                self._watch()
                looked = time.monotonic()
        for fork in self._forks.values():
            self._kill(fork, "the stage has ended")
        self._kept.clear()
        self._has_strays = True
        deadline = time.monotonic() + END_TIMEOUT_S
        while (self._forks or self._has_strays) and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.01)

    def _serve_once(self) -> bool:
        """False when whoever asks is gone."""
        waits = WATCH_S if self._forks or self._has_strays else None
        for file, event in self._poll.poll(None if waits is None else waits * 1000):
            if file == self._control.fileno():
                byte, files, _, _ = socket.recv_fds(self._control, 1, 1)
                if not byte:
                    return False
                for number in files:
                    os.set_inheritable(number, False)  # what a fork starts does not speak for it
                    self._begin(socket.socket(fileno=number))
            elif file in self._by_file:
                fork = self._by_file[file]
                if file == fork.output:
                    self._read(fork)
                elif event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
                    self._poll.unregister(file)
                    self._kill(fork, "its sample has ended")
        return True

    def _begin(self, connection: socket.socket) -> None:
        parent, pipe = os.getpid(), list[int]()
        try:
            pipe += os.pipe()
            pid = os.fork()
        except OSError:  # too many processes or files, or too little memory: whoever waits for it may try again
            connection.close()
            for end in pipe:
                os.close(end)
            return
        output, printed = pipe
        if not pid:
            self._be_fork(connection, printed, parent)
        os.close(printed)
        os.set_blocking(output, False)
        fork = self._forks[pid] = _Fork(pid, connection, output)
        self._by_file |= {output: fork, connection.fileno(): fork}
        self._poll.register(output, select.POLLIN)
        self._poll.register(connection, select.POLLRDHUP)  # its other end says no more

    def _be_fork(self, connection: socket.socket, printed: int, parent: int) -> None:
        """Serve one request; never returns."""
        try:
            tree.killed_with_parent(parent)
            tree.adopt_orphans()
            os.setsid()
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            for file in (self._control.fileno(), *self._by_file):
                os.close(file)
            limits = self._limits
            for which, limit, hard in (
                (resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 1),  # first a signal that says what it is
                (resource.RLIMIT_AS, limits["max_bytes"], limits["max_bytes"]),
                (resource.RLIMIT_FSIZE, limits["max_file_bytes"], limits["max_file_bytes"]),
            ):
                if limit:
                    resource.setrlimit(which, (limit, hard))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            self._serve(Line(connection))
        except ConnectionError:
            pass  # its sample has ended
        except BaseException as error:  # noqa: BLE001 - what it serves has closed the connection, perhaps
            with suppress(OSError):
                os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)

    def _read(self, fork: _Fork) -> None:
        """Read what it prints: to the log as far as it is shown, the last of it for the reason."""
        try:
            block = os.read(fork.output, 1 << 16)
        except BlockingIOError:
            return
        if not block:
            with suppress(KeyError):
                self._poll.unregister(fork.output)
        shown = block[: max(0, self._limits["shown_bytes"] - fork.num_shown)]
        fork.num_shown += len(shown)
        fork.tail = (fork.tail + block)[-TAIL_BYTES:]
        with suppress(OSError):  # the log may have ended with the stage
            sys.stderr.buffer.write(shown)
            sys.stderr.buffer.flush()

    def _kill(self, fork: _Fork, reason: str) -> None:
        """End all of its session at once: the kernel lets no fork slip through."""
        fork.reason = fork.reason or reason
        with suppress(ProcessLookupError):
            os.killpg(fork.pid, signal.SIGKILL)
        tree.send(fork.pid, signal.SIGKILL)  # it may not have made its session yet

    def _reap(self) -> None:
        for fork in list(self._forks.values()):
            # Its group is ended before its number is given back, and may be another's.
            if os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._kill(fork, "")
                _, status = os.waitpid(fork.pid, 0)
                self._has_strays = True
                self._leave(fork, os.waitstatus_to_exitcode(status))
        if self._has_strays:  # while a fork is alive its orphans are its own children
            self._has_strays = tree.kill_children(but={*self._forks, *self._kept})

    def _leave(self, fork: _Fork, code: int) -> None:
        """Say why it ended, and forget it."""
        self._read(fork)
        last = {
            "ended": fork.reason or f"its process {tree.how_ended(code)}",
            "is_lost": not fork.reason and code == -signal.SIGKILL,
            "printed": fork.tail.decode("utf-8", "replace").strip(),
        }
        with suppress(OSError):  # nobody may listen any more
            fork.connection.send(json.dumps(last).encode() + b"\n", socket.MSG_DONTWAIT)
        for file in (fork.output, fork.connection.fileno()):
            with suppress(KeyError):
                self._poll.unregister(file)
            del self._by_file[file]
        os.close(fork.output)
        fork.connection.close()
        del self._forks[fork.pid]

    def _watch(self) -> None:
        """End forks with too many processes, or too much memory in all of them together."""
        most, max_bytes = self._limits["max_processes"], self._limits["max_bytes"]
        for fork in self._forks.values() if most else ():
            below = []
            for pid in tree.descendants(fork.pid):
                below.append(pid)
                if len(below) >= most:
                    self._kill(fork, f"it started more than {most} processes")
                    break
            if below and sum(map(tree.private_bytes, (fork.pid, *below))) > max_bytes:
                self._kill(fork, f"its processes took more than {max_bytes} bytes together")


if __name__ == "__main__":
    main()
