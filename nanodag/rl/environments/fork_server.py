"""The process of an environment. It makes the object once and forks an episode for each sample.

`python -m nanodag.rl.environments.fork_server CONTROL`. CONTROL: a Unix stream socket. Standard input has JSON: `path`
(`module:Class`), `options`, `cpu_s`, `max_bytes` and `max_processes`. It answers one line, `{"roles"}` or `{"error"}`.
Each byte on CONTROL then brings a socket, over which an episode is spoken to (nanodag.rl.environments.episode). When
the other end of that is closed, the episode ends; when CONTROL is closed, all do, and this process.

An episode has a session of its own and limits on CPU time and address space. Its processes, and their memory together,
are looked at every WATCH_S seconds (on Linux). Nothing of it is left when it has ended: processes that lost their
parent become children of the episode, later of this process. An episode that ends by itself has its reason as the last
line on its socket: `{"ended": ..., "is_lost": ...}`; it is lost where somebody else has killed it.
"""

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nanodag.host.below import bytes_of, children_of, descendants
from nanodag.host.parent import killed_with_parent
from nanodag.own_code.blame import with_place
from nanodag.own_code.functions import function_at
from nanodag.rl.environments.episode import serve

START_TIMEOUT_S = 120.0
WATCH_S = 0.2
END_TIMEOUT_S = 5.0
SHOWN_BYTES = 1 << 13  # of what an episode prints; the rest is not written to the log
TAIL_BYTES = 500
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Serve until CONTROL is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    job = json.load(sys.stdin)  # anybody on the machine may read a command line
    pid = os.getpid()
    _adopt_orphans()
    signal.setitimer(signal.ITIMER_REAL, START_TIMEOUT_S)  # the kernel ends an import that hangs when nobody waits
    try:
        environment = function_at(job["path"])(**job["options"])
        if missing := [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]:
            raise TypeError(f"it has no method {missing[0]}")
        said = json.dumps({"roles": getattr(environment, "roles", None)}, allow_nan=False)
    except BaseException as error:  # noqa: BLE001 - whatever a module raises when it is imported
        environment, said = None, json.dumps({"error": with_place(error)})
    if os.getpid() != pid:  # it forked, and this is the copy
        os._exit(1)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    gc.freeze()  # a collection in a fork would copy every page
    server = ForkServer(control, environment, job)
    control.sendall(said.encode() + b"\n")
    server.run()


@dataclass(slots=True)
class Forked:
    """An episode under way. connection: its end of the socket. output: what it prints. reason: why it was ended."""

    pid: int
    connection: socket.socket
    output: int
    tail: bytes = b""
    num_shown: int = 0
    reason: str = ""


class ForkServer:
    """Forks episodes, and ends them with all that they have started."""

    def __init__(self, control: socket.socket, environment: Any, limits: Mapping[str, Any]) -> None:
        self._control, self._environment, self._limits = control, environment, limits
        self._episodes: dict[int, Forked] = {}  # by process
        self._by_file: dict[int, Forked] = {}
        self._kept = set(children_of(os.getpid()))  # which the environment started when it was made
        self._has_strays = False
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> None:
        """Serve until the controller is gone."""
        looked = time.monotonic()
        while self._serve_once():
            self._reap()
            if self._episodes and time.monotonic() - looked > WATCH_S:
                self._watch()
                looked = time.monotonic()
        for episode in self._episodes.values():
            self._kill(episode, "the stage has ended")
        self._kept.clear()
        self._has_strays = True
        deadline = time.monotonic() + END_TIMEOUT_S
        while (self._episodes or self._has_strays) and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.01)

    def _serve_once(self) -> bool:
        """False when the controller is gone."""
        waits = WATCH_S if self._episodes or self._has_strays else None
        for file, event in self._poll.poll(None if waits is None else waits * 1000):
            if file == self._control.fileno():
                byte, files, _, _ = socket.recv_fds(self._control, 1, 1)
                if not byte:
                    return False
                for connection in files:
                    self._begin(socket.socket(fileno=connection))
            elif file in self._by_file:
                episode = self._by_file[file]
                if file == episode.output:
                    self._read(episode)
                elif event & (select.POLLHUP | select.POLLERR):
                    self._poll.unregister(file)
                    self._kill(episode, "its sample has ended")
        return True

    def _begin(self, connection: socket.socket) -> None:
        parent, (output, printed) = os.getpid(), os.pipe()
        try:
            pid = os.fork()
        except OSError:  # too many processes, or too little memory: whoever waits for it may try again
            connection.close()
            os.close(output)
            os.close(printed)
            return
        if not pid:
            self._be_episode(connection, printed, parent)
        os.close(printed)
        os.set_blocking(output, False)
        episode = self._episodes[pid] = Forked(pid, connection, output)
        self._by_file |= {output: episode, connection.fileno(): episode}
        self._poll.register(output, select.POLLIN)
        self._poll.register(connection, 0)  # says only when its other end is closed

    def _be_episode(self, connection: socket.socket, printed: int, parent: int) -> None:
        """The fork: never returns."""
        try:
            killed_with_parent(parent)
            _adopt_orphans()
            os.setsid()
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            for file in (self._control.fileno(), *self._by_file):
                os.close(file)
            cpu_s, max_bytes = int(self._limits["cpu_s"]), int(self._limits["max_bytes"])
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # first a signal that says what it is
            resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            serve(self._environment, connection)
        except ConnectionError:
            pass  # its sample has ended
        except BaseException as error:  # noqa: BLE001 - the environment has closed the connection, perhaps
            with suppress(OSError):
                os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)

    def _read(self, episode: Forked) -> None:
        """What it prints: to the log as far as it is shown, the last of it for the reason."""
        try:
            block = os.read(episode.output, 1 << 16)
        except BlockingIOError:
            return
        if not block:
            with suppress(KeyError):
                self._poll.unregister(episode.output)
        shown = block[: max(0, SHOWN_BYTES - episode.num_shown)]
        episode.num_shown += len(shown)
        episode.tail = (episode.tail + block)[-TAIL_BYTES:]
        with suppress(OSError):  # the log may have ended with the stage
            sys.stderr.buffer.write(shown)
            sys.stderr.buffer.flush()

    def _kill(self, episode: Forked, reason: str) -> None:
        """End all of its session at once: the kernel lets no fork slip through."""
        episode.reason = episode.reason or reason
        with suppress(ProcessLookupError):
            os.killpg(episode.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # it may not have made its session yet
            os.kill(episode.pid, signal.SIGKILL)

    def _reap(self) -> None:
        for episode in list(self._episodes.values()):
            # Its group is ended before its number is given back, and may be another's.
            if os.waitid(os.P_PID, episode.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._kill(episode, "")
                _, status = os.waitpid(episode.pid, 0)
                self._has_strays = True
                self._leave(episode, os.waitstatus_to_exitcode(status))
        if self._has_strays:
            self._end_strays()

    def _leave(self, episode: Forked, code: int) -> None:
        """Say why it ended, and forget it."""
        self._read(episode)
        said = episode.tail.decode("utf-8", "replace").strip()
        reason = episode.reason or f"its process {how_ended(code)}" + (f"; it printed: {said}" if said else "")
        with suppress(OSError):  # nobody may listen any more
            last = {"ended": reason, "is_lost": not episode.reason and code == -signal.SIGKILL}
            episode.connection.send(json.dumps(last).encode() + b"\n", socket.MSG_DONTWAIT)
        for file in (episode.output, episode.connection.fileno()):
            with suppress(KeyError):
                self._poll.unregister(file)
            del self._by_file[file]
        os.close(episode.output)
        episode.connection.close()
        del self._episodes[episode.pid]

    def _end_strays(self) -> None:
        """End what episodes that have ended left. While an episode is alive its orphans are its own children."""
        strays = [pid for pid in children_of(os.getpid()) if pid not in self._episodes and pid not in self._kept]
        for pid in strays:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._has_strays = bool(strays)

    def _watch(self) -> None:
        """End episodes with too many processes, or too much memory in all of them together."""
        most, max_bytes = int(self._limits["max_processes"]), int(self._limits["max_bytes"])
        for episode in self._episodes.values():
            below = []
            for pid in descendants(episode.pid):
                below.append(pid)
                if len(below) >= most:
                    self._kill(episode, f"it started more than {most} processes")
                    break
            if below and sum(map(bytes_of, (episode.pid, *below))) > max_bytes:
                self._kill(episode, f"its processes took more than {max_bytes} bytes together")


def how_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (" (its limit of CPU time)" if name == "SIGXCPU" else "")


def _adopt_orphans() -> None:
    """Processes below this one that lose their parent become its children, not init's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if __name__ == "__main__":
    main()
