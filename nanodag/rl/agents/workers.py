"""Processes that run agents' functions, one sample at a time each, kept for the next one. No torch here.

Each forks for a sample (`worker.py`). One whose sample hangs is ended with all that it started, and another takes its
place. All of it belongs to the door's event loop.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from nanodag.errors import ConfigError
from nanodag.host.ports import no_proxy_here
from nanodag.rl.agents.visit import AgentFailed, AgentLost

WORKER = Path(__file__).with_name("worker.py")
MAX_REPLY_BYTES = 1 << 20
LINES_SHOWN = 5
TAIL_BYTES = 2000
END_TIMEOUT_S = 1.0


class Workers:
    """Those of one function. python: the interpreter. folders: where its module is looked for, after `python`'s own.

    at_once: samples that run at a time; more wait. max_bytes: address space of a process, 0 for no bound. timeout_s: of
    a sample.
    """

    def __init__(
        self, function: str, *, python: str, folders: Sequence[str], at_once: int, max_bytes: int, timeout_s: float
    ) -> None:
        if at_once < 1 or timeout_s <= 0:
            raise ConfigError(f"agent {function}: at_once {at_once} and seconds {timeout_s:g} must be above 0.")
        self._python, self._timeout_s = python, timeout_s
        self._first = {"function": function, "folders": folders, "max_bytes": max_bytes, "timeout_s": timeout_s}
        self.places = asyncio.Semaphore(at_once)
        self._idle: list[_Worker] = []

    async def run(self, task: Mapping[str, Any]) -> Any:
        """What the function returns for a task. Raises AgentFailed with the reason why it returns nothing."""
        worker = self._idle.pop() if self._idle else _Worker(self._python, self._first)
        is_good = False
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await worker.ask(task)
            except TimeoutError:
                raise AgentFailed(f"it took longer than {self._timeout_s:g} s", worker.last_words()) from None
            is_good = True
            if (code := answer.get("code", 0)) != 0:
                kind = AgentLost if code == -signal.SIGKILL else AgentFailed
                raise kind(f"its process ended with code {code}", worker.last_words())
            if "error" in answer:
                raise AgentFailed(str(answer["error"]), worker.last_words())
            return answer.get("returned")
        finally:
            if is_good:
                worker.forget_words()
                self._idle.append(worker)
            else:
                worker.end()

    def close(self) -> None:
        """End those that wait for a sample. Nobody has to: each ends with this process."""
        while self._idle:
            self._idle.pop().end()


class _Worker:
    """One process."""

    def __init__(self, python: str, first: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        self._words = tempfile.TemporaryFile(prefix="nanodag-agent-")  # noqa: SIM115 - what it writes, till its end
        with theirs:
            self._process = subprocess.Popen(
                [python, "-u", str(WORKER), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,
            )
        self._socket, self._rest = ours, b""
        ours.setblocking(False)
        self._before = json.dumps(first).encode() + b"\n"

    async def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The process's answer. Raises AgentFailed when it ends, or says what is no answer."""
        loop = asyncio.get_running_loop()
        question, self._before = self._before + json.dumps(task, default=str).encode() + b"\n", b""
        try:
            await loop.sock_sendall(self._socket, question)
            while b"\n" not in self._rest:
                block = await loop.sock_recv(self._socket, 1 << 16)
                self._rest += block
                if not block:
                    raise self._ended()
                if len(self._rest) > MAX_REPLY_BYTES:
                    raise AgentFailed(f"it returned more than {MAX_REPLY_BYTES} bytes")
        except OSError as error:
            raise self._ended() from error
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or self._rest:
            raise AgentFailed("its process answered what is no answer")
        return answer

    def last_words(self) -> str:
        """The last lines of what it wrote; empty where there are none."""
        words = self._words.fileno()
        tail = os.pread(words, TAIL_BYTES, max(0, os.fstat(words).st_size - TAIL_BYTES))
        return "\n".join(tail.decode(errors="replace").splitlines()[-LINES_SHOWN:])

    def forget_words(self) -> None:
        """Begin anew for the next sample."""
        self._words.seek(0)
        self._words.truncate()

    def end(self) -> None:
        """Kill it and all that it started."""
        self._socket.close()
        with suppress(psutil.Error):
            below = psutil.Process(self._process.pid).children(recursive=True)
            for one in below:
                with suppress(psutil.Error):
                    one.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._words.close()

    def _ended(self) -> AgentFailed:
        try:
            code = self._process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return AgentFailed("its process answers no more", self.last_words())
        kind = AgentLost if code == -signal.SIGKILL else AgentFailed
        return kind(f"its process ended with code {code}", self.last_words())


def _environment() -> dict[str, str]:
    """Of a process: this one's, but that no proxy stands before the API."""
    return {**os.environ, **no_proxy_here(), "PYTHONHASHSEED": "0"}


def interpreter(python: str) -> str:
    """The path of an interpreter: this process's own for `auto`. Raises ConfigError for one that is not there."""
    found = sys.executable if python == "auto" else shutil.which(python)
    if found is None:
        raise ConfigError(f"The agent's python {python!r} is no program. Give the path of an interpreter, or `auto`.")
    return found
