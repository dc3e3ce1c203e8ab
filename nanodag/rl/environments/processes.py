"""The controller's end of an environment's process and of its episodes. No torch here."""

import asyncio
import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from nanodag.errors import ConfigError
from nanodag.rl.environments.fork_server import START_TIMEOUT_S, how_ended
from nanodag.rl.environments.observations import roles_of

MAX_ANSWER_BYTES = 4 << 20
END_TIMEOUT_S = 5.0
LONGEST_START = 1 << 16  # bytes of the first answer


class EnvironmentFailed(RuntimeError):
    """An episode cannot go on; the message is the sample's reason."""


class EnvironmentLost(EnvironmentFailed):
    """Its process was killed by somebody else, such as the system when memory is short: played again, it may go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """step_s: seconds that an answer may take. cpu_s: CPU time of an episode. max_bytes: address space of each of its
    processes, and memory of all together. max_processes: that it may start."""

    step_s: float
    cpu_s: int
    max_bytes: int
    max_processes: int


class EnvironmentProcess:
    """The process of one environment, started with the first episode, and again when it is gone.

    path: `module:Class`. options: of its constructor. roles: who speaks, and whether it is trained, once it is started.
    """

    def __init__(self, path: str, options: Mapping[str, Any], limits: EpisodeLimits) -> None:
        self._path, self._limits = path, limits
        self._job = json.dumps({"path": path, "options": dict(options), **asdict(limits)})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: ConfigError | None = None
        self.roles: Mapping[str, bool] = {}

    def episode(self) -> "Episode":
        """A new episode. From any thread. Raises ConfigError where the environment cannot be made."""
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
        return Episode(mine, self._limits.step_s)

    def close(self) -> None:
        """End it with all its episodes."""
        with self._lock:
            self._end()

    def _hand_over(self, theirs: socket.socket) -> None:
        if self._process is None:
            self._start()
        socket.send_fds(self._control, [b"e"], [theirs.fileno()])

    def _start(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._control, control = socket.socketpair()
        # Numbers of threads, and the order of sets, are the same in each run.
        fixed = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        with control:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nanodag.rl.environments.fork_server", str(control.fileno())],
                stdin=subprocess.PIPE,
                stdout=sys.stderr,
                env={**os.environ, **fixed, "PYTHONUNBUFFERED": "1"},
                pass_fds=(control.fileno(),),
                start_new_session=True,  # who kills the stage's group leaves it the time to end what episodes started
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as given:  # where it has ended, its first answer says so
            given.write(self._job.encode())
        try:
            self.roles = roles_of(self._first_answer(self._process)["roles"])
        except (ValueError, OSError) as error:
            self._end()
            self._failure = ConfigError(f"The environment {self._path!r} cannot be used: {error}")
            raise self._failure from error

    def _first_answer(self, process: "subprocess.Popen[bytes]") -> dict[str, Any]:
        self._control.settimeout(START_TIMEOUT_S)
        said = b""
        try:
            while not said.endswith(b"\n") and len(said) < LONGEST_START:
                block = self._control.recv(LONGEST_START)
                if not block:
                    raise ValueError(f"its process {how_ended(process.wait())} when it was made")
                said += block
        except TimeoutError:
            raise ValueError(f"it was not made in {START_TIMEOUT_S:g} s") from None
        self._control.settimeout(None)
        answer: dict[str, Any] = json.loads(said)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_TIMEOUT_S)
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


_PROCESSES: dict[str, EnvironmentProcess] = {}
_PROCESSES_LOCK = threading.Lock()


def process_of(path: str, options: Mapping[str, Any], limits: EpisodeLimits) -> EnvironmentProcess:
    """The one of this environment with these options and limits, which lives as long as this process."""
    key = json.dumps([path, dict(options), asdict(limits)], sort_keys=True)
    with _PROCESSES_LOCK:
        if key not in _PROCESSES:
            _PROCESSES[key] = EnvironmentProcess(path, options, limits)
        return _PROCESSES[key]


def end_processes() -> None:
    """End all of them."""
    with _PROCESSES_LOCK:
        for process in _PROCESSES.values():
            process.close()
        _PROCESSES.clear()


atexit.register(end_processes)


class Episode:
    """One episode, spoken to from one event loop. Every call raises EnvironmentFailed with the reason."""

    def __init__(self, connection: socket.socket, step_s: float) -> None:
        self._connection, self._step_s = connection, step_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def reset(self, *, seed: int, record: Mapping[str, Any]) -> dict[str, Any]:
        """{"observation", "tools"}, unchecked."""
        return await self._asked("reset", {"seed": seed, "record": dict(record)})

    async def step(self, *, text: str, calls: list[dict[str, Any]], is_cut: bool, role: str) -> dict[str, Any]:
        """{"observation", "reward", "done", "info"}, unchecked. calls: each with `name` and `arguments`."""
        return await self._asked("step", {"text": text, "calls": calls, "is_cut": is_cut, "role": role})

    async def end(self) -> dict[str, Any]:
        """{"metrics"}, unchecked."""
        return await self._asked("end", {})

    def close(self) -> None:
        """End its process, whatever it is at."""
        if self._streams is not None:
            self._streams[1].transport.abort()
        self._connection.close()

    async def _asked(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._connection, limit=MAX_ANSWER_BYTES)
        reader, writer = self._streams
        try:
            async with asyncio.timeout(self._step_s):
                writer.write(json.dumps({name: given}, default=str).encode() + b"\n")
                await writer.drain()
                line = await reader.readline()
        except TimeoutError:
            raise EnvironmentFailed(f"{name} took longer than {self._step_s:g} s") from None
        except ValueError:  # of readline
            raise EnvironmentFailed(f"{name} answered more than {MAX_ANSWER_BYTES} bytes") from None
        except ConnectionError:
            line = await self._last_words(reader)
        return _answer(name, line)

    async def _last_words(self, reader: asyncio.StreamReader) -> bytes:
        """Why a process is gone that could not be written to any more."""
        with suppress(ConnectionError, ValueError, TimeoutError):
            async with asyncio.timeout(1.0):
                return await reader.readline()
        return b""


def _answer(name: str, line: bytes) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        raise EnvironmentLost(f"{name} has no answer: the environment's process is gone")
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise EnvironmentFailed(f"{name} has an answer that is no JSON object: {line[:80]!r}")
    if "error" in answer:
        raise EnvironmentFailed(f"{name}: {answer['error']}")
    if "ended" in answer:
        raise (EnvironmentLost if answer.get("is_lost") else EnvironmentFailed)(f"{name}: {answer['ended']}")
    return answer
