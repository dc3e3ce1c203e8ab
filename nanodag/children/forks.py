"""The asking end of a fork server (nanodag.children.fork_server). No torch here."""

import asyncio
import atexit
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from nanodag.children import fork_server
from nanodag.children.child import Child, start_child
from nanodag.errors import ConfigError
from nanodag.host.ports import no_proxy_here
from nanodag.host.threads import MadeOnce

MAX_ANSWER_BYTES = 4 << 20
LAST_WORDS_TIMEOUT_S = 1.0
LINES_SHOWN = 5
# Numbers of threads, and the order of sets, are the same in each run.
FIXED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class EpisodeFailed(Exception):
    """An episode came to nothing; the message is its sample's reason. last_words: the last lines that it wrote,
    empty where there are none."""

    def __init__(self, reason: str, last_words: str = "") -> None:
        super().__init__(reason, last_words)
        self.last_words = "\n".join(last_words.strip().splitlines()[-LINES_SHOWN:])

    def __str__(self) -> str:
        return str(self.args[0])


class EpisodeLost(EpisodeFailed):
    """Its process was killed by somebody else, as the system when memory is short: played again, it may do better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkLimits:
    """Bounds of a fork; 0 for none. cpu_s: its CPU time. max_bytes: address space of each of its processes, and, where
    max_processes bounds their number, memory of all together. max_file_bytes: of each file that it writes. shown_bytes:
    the most of what it prints that goes to the log."""

    cpu_s: int = 0
    max_bytes: int = 0
    max_processes: int = 0
    max_file_bytes: int = 0
    shown_bytes: int = 1 << 13


class ForkServer:
    """A fork server, started with the first fork, and again when it is gone.

    maker, given: as the server has them. python: its interpreter. name: in messages. about: what the maker tells, once
    it is started.
    """

    def __init__(
        self,
        maker: str,
        given: Mapping[str, Any],
        limits: ForkLimits,
        *,
        name: str,
        python: str = sys.executable,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        where = ["-m", fork_server.__name__] if python == sys.executable else [fork_server.__file__]
        self._command, self._name, self._max_bytes = [python, *where], name, max_answer_bytes
        self._job = json.dumps({"maker": maker, "given": dict(given), "limits": asdict(limits)}).encode()
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._failure: ConfigError | None = None
        self.about: Any = None
        _SERVERS.append(self)

    def fork(self) -> "Fork":
        """Start a fork; from any thread. Raises ConfigError where the object cannot be made, EpisodeLost where somebody
        killed the process that makes it."""
        mine, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                try:
                    self._hand_over(theirs)
                except OSError:  # it is gone
                    self._end()
                    self._hand_over(theirs)
        except BaseException:
            mine.close()
            raise
        return Fork(mine, self._max_bytes)

    def close(self) -> None:
        """End it with all its forks."""
        with self._lock:
            self._end()

    def _hand_over(self, theirs: socket.socket) -> None:
        if self._child is not None and not self._child.is_alive:  # what it started may still hold its end of the line
            self._end()
        if self._child is None:
            self._start()
        assert self._child is not None and self._child.line is not None
        socket.send_fds(self._child.line.socket, [b"f"], [theirs.fileno()])

    def _start(self) -> None:
        if self._failure is not None:
            raise self._failure
        environment = {**os.environ, **no_proxy_here(), **FIXED, "PYTHONUNBUFFERED": "1"}
        # Its session is its own: who kills the stage's group leaves it the time to end what forks started.
        self._child = child = start_child(self._command, environment=environment, given=self._job, has_line=True)
        assert child.line is not None
        try:
            answer = child.line.hear(fork_server.START_TIMEOUT_S)
            if "error" in answer:
                raise ValueError(answer["error"])
            self.about = answer["about"]
        except (ValueError, OSError) as error:
            reason = str(error)
            if isinstance(error, TimeoutError):
                reason = f"it was not made in {fork_server.START_TIMEOUT_S:g} s"
            elif isinstance(error, OSError):
                reason = f"its process {child.how_ended()} when it was made"
                if child.code == -signal.SIGKILL:
                    self._end()
                    raise EpisodeLost(reason) from None
            self._end()
            self._failure = ConfigError(f"{self._name} cannot be used: {reason}")
            raise self._failure from error

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.hang_up(fork_server.END_TIMEOUT_S)  # it ends with all that it has started


@MadeOnce
def shared_server(maker: str, given: str, limits: ForkLimits, **named: Any) -> ForkServer:
    """The one fork server of all who ask with the same arguments, which are ForkServer's. given: as JSON."""
    return ForkServer(maker, json.loads(given), limits, **named)


_SERVERS: list[ForkServer] = []


@atexit.register
def end_all() -> None:
    """End all fork servers; one that is asked again starts again."""
    for server in _SERVERS:
        server.close()


class Fork:
    """One fork, spoken to from one event loop."""

    def __init__(self, connection: socket.socket, max_answer_bytes: int) -> None:
        self._connection, self._max_bytes = connection, max_answer_bytes
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, message: Any, timeout_s: float, name: str = "") -> dict[str, Any]:
        """Its answer. Raises as `hear`."""
        await self.send(message)
        return await self.hear(timeout_s, name)

    async def send(self, message: Any) -> None:
        """Send a message; one that is gone already says so when it is heard."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._connection, limit=self._max_bytes)
        self._streams[1].write(json.dumps(message, default=str).encode() + b"\n")

    async def hear(self, timeout_s: float | None = None, name: str = "") -> dict[str, Any]:
        """Its next message. name: of what was asked, in messages. Raises EpisodeFailed with the reason, and ends it,
        where that does not come in time, or is no JSON object."""
        failure: EpisodeFailed | None = None
        try:
            async with asyncio.timeout(timeout_s):
                return _checked(await self._said())
        except TimeoutError:
            failure = EpisodeFailed(f"{name or 'it'} took longer than {timeout_s:g} s")
        except EpisodeFailed as error:
            failure = type(error)(f"{name}: {error}" if name else str(error), error.last_words)
        raise type(failure)(str(failure), failure.last_words or await self._last_words())

    def close(self) -> None:
        """End it, whatever it is at."""
        if self._streams is not None:
            self._streams[1].transport.abort()
        self._connection.close()

    async def _said(self) -> bytes:
        assert self._streams is not None
        reader, writer = self._streams
        try:
            await writer.drain()
            return await reader.readline()
        except ValueError:  # of readline
            raise EpisodeFailed(f"it answered more than {self._max_bytes} bytes") from None
        except ConnectionError:
            with suppress(ConnectionError, ValueError):
                return await reader.readline()  # why it is gone
            return b""

    async def _last_words(self) -> str:
        """End it; returns what it printed last."""
        assert self._streams is not None
        reader, writer = self._streams
        with suppress(OSError, ValueError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_TIMEOUT_S):
                writer.write_eof()
                while line := await reader.readline():
                    last = json.loads(line)
                    if isinstance(last, dict) and "ended" in last:
                        return str(last.get("printed"))
        return ""


def _checked(line: bytes) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        raise EpisodeLost("it has no answer, and its process is gone")
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise EpisodeFailed(f"its answer is no JSON object: {line[:80]!r}")
    if "error" in answer:
        raise EpisodeFailed(str(answer["error"]))
    if "ended" in answer:
        raise (EpisodeLost if answer.get("is_lost") else EpisodeFailed)(
            str(answer["ended"]), str(answer.get("printed", ""))
        )
    return answer
