"""Starts verifiers_server.py in verifiers' environment, and talks to it by HTTP on a Unix socket. No torch here.

A process serves many rollouts at once. One that ends is started again by the next rollout, and one that does not answer
/health any more, or takes too much memory, is ended. Those that were under way in it are lost, with the end of its log
as the reason.
"""

import asyncio
import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil

from nanodag.errors import SourceError
from nanodag.errors.words import size
from nanodag.guests.verifiers_install import find_python
from nanodag.host.parent import has_ended
from nanodag.host.patience import Patience
from nanodag.host.ports import no_proxy_here

SERVER = Path(__file__).with_name("verifiers_server.py")
START_TIMEOUT_S = 120.0
HEALTH_TIMEOUT_S = 30.0
LOOK_EVERY_S = 1.0
STOP_TIMEOUT_S = 3.0
POLL_S = 0.05
LOG_LINES = 8
TASKS_TIMEOUT_S = 600.0
MAX_BYTES = 8 << 30
NO_SAMPLING: Mapping[str, Any] = {}


class RolloutFailed(Exception):
    """A rollout that came to nothing; the message is its sample's reason."""


class RolloutLost(RolloutFailed):
    """A rollout whose process ended under it, for which another one may be to blame."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rollout came to. reward: the weighted sum of the rubric's parts. components: the parts, without weights.
    is_cut: a limit ended it. reply: what was said last. Tokens: of all calls, as the address counts them."""

    reward: float
    components: Mapping[str, float]
    metrics: Mapping[str, float]
    turns: int
    is_cut: bool
    reply: str
    prompt_tokens: int
    completion_tokens: int


def block_of(module: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The `[env]` block of verifiers for a taskset, with options by their dotted names, as `agent.max_turns`."""
    block: dict[str, Any] = {"taskset": {"id": module}}
    for name, value in options.items():
        *sections, last = name.split(".")
        inner = block
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return block


def tasks_of(module: str, options: Mapping[str, Any], *, stop: int | None = None) -> list[dict[str, Any]]:
    """The tasks of a taskset in their order: `{"task": ..., "messages": [...]}` each. stop: the first that is left out.

    Raises MissingTool where verifiers is not installed, SourceError with the end of what it said where it fails."""
    command = [str(find_python()), str(SERVER), json.dumps(block_of(module, options)), "--tasks"]
    command += [] if stop is None else [str(stop)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=_environment(), timeout=TASKS_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SourceError(f"verifiers has not loaded the tasks of {module} in {TASKS_TIMEOUT_S:g} s.") from error
    if done.returncode != 0:
        raise SourceError(f"verifiers cannot load the tasks of {module}:\n{_end(done.stderr)}")
    return [json.loads(line) for line in done.stdout.splitlines()]


@cache
def module_file(module: str) -> Path:
    """The file of a taskset's module as verifiers' interpreter finds it, which is not imported. Raises MissingTool,
    SourceError where there is none."""
    name = module.replace("-", "_")
    code = f"import importlib.util as u; s = u.find_spec({name!r}) or u.find_spec('verifiers.v1.tasksets.{name}')"
    done = subprocess.run(
        [str(find_python()), "-c", f"{code}; print(s.origin if s else '')"],
        capture_output=True, text=True, env=_environment(), check=False,
    )  # fmt: skip
    file = Path(done.stdout.strip() or "/")
    if not file.is_file():
        raise SourceError(
            f"There is no module {name} beside the pipeline file, on PYTHONPATH, or in verifiers' environment "
            f"({find_python()}). {_end(done.stderr)}".strip()
        )
    return file


class VerifiersProcess:
    """The process for one environment. It belongs to one event loop. block: as `block_of` has it. max_bytes: of memory,
    with all that it starts."""

    def __init__(self, block: Mapping[str, Any], *, max_bytes: int = MAX_BYTES) -> None:
        self._block, self._max_bytes = dict(block), max_bytes
        self._starting = asyncio.Lock()
        self._running: _Running | None = None

    async def rollout(
        self,
        task: Mapping[str, Any],
        *,
        base_url: str,
        api_key: str,
        model: str,
        sampling: Mapping[str, Any] = NO_SAMPLING,
    ) -> Outcome:
        """Run one rollout of a task against an OpenAI address. To cancel this ends it. sampling: what each call asks
        for, by OpenAI's names. Raises RolloutFailed, and RolloutLost where the process ended."""
        running = await self._process()
        asked = {
            "task": dict(task),
            "base_url": base_url,
            "api_key": api_key,
            "model": model,
            "sampling": dict(sampling),
        }
        try:
            reply = await running.client.post("/rollouts", json=asked)
        except httpx.HTTPError as error:
            await asyncio.sleep(POLL_S)  # until the system has its exit code
            raise RolloutLost(f"{type(error).__name__} of the environment's process: {running.end()}") from error
        if reply.status_code != 200:
            raise RolloutFailed(reply.text[:500])
        found = reply.json()
        if not found["ok"]:
            raise RolloutFailed(found["error"])
        return Outcome(
            reward=found["reward"],
            components=found["components"],
            metrics=found["metrics"],
            turns=found["turns"],
            is_cut=found["truncated"],
            reply=found["reply"],
            prompt_tokens=found["prompt_tokens"],
            completion_tokens=found["completion_tokens"],
        )

    async def close(self) -> None:
        """End the process."""
        if self._running is not None:
            await self._running.close()

    async def _process(self) -> "_Running":
        async with self._starting:
            if self._running is None or not self._running.is_alive:
                if self._running is not None:
                    await self._running.close()
                self._running = await _started(self._block, self._max_bytes)
            return self._running


@dataclass(kw_only=True)
class _Running:
    """It leads a process group, so that what it has started is found when it is gone."""

    process: "subprocess.Popen[bytes]"
    client: httpx.AsyncClient
    log_path: Path
    max_bytes: int
    fault: str = ""
    watching: "asyncio.Task[None] | None" = None

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None and not has_ended(self.process)

    def end(self) -> str:
        """How it ended, with the end of its log."""
        if not self.is_alive:
            self.kill()
        code = self.process.returncode
        how = "it runs" if code is None else f"it ended with code {code}{self.fault}"
        return f"{how}; the end of its log:\n{_end(self.log_path.read_text(errors='replace'))}"

    async def watch(self) -> None:
        """Kill it once it takes too much memory, or does not answer any more: code of an environment that blocks holds
        up all of them."""
        while self.is_alive:
            try:
                await self.client.get("/health", timeout=HEALTH_TIMEOUT_S)
            except httpx.HTTPError:
                self.kill()
            if (taken := sum(map(_memory, self._all()))) > self.max_bytes:
                self.fault = f", as it took {size(taken)} of memory, and max_bytes allows {size(self.max_bytes)}"
                self.kill()
            await asyncio.sleep(LOOK_EVERY_S)
        self.kill()

    async def close(self) -> None:
        """End it, and the connections to it."""
        if self.watching is not None:
            self.watching.cancel()
        await self.client.aclose()
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Ask it to end, and kill it where it does not in time."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        if self.is_alive:
            os.kill(self.process.pid, signal.SIGTERM)
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.kill()

    def kill(self) -> None:
        """End it with all that it started, also where it has ended by itself."""
        if self.process.returncode is not None:  # its id may be another's by now
            return
        below = self._all()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for one in below:  # tool servers lead groups of their own
            with suppress(psutil.Error):
                one.kill()
        self.process.wait()

    def _all(self) -> list[psutil.Process]:
        """It and those below it, while it is there."""
        if self.process.returncode is not None:
            return []
        with suppress(psutil.Error):
            itself = psutil.Process(self.process.pid)
            return [itself, *itself.children(recursive=True)]
        return []


def _memory(process: psutil.Process) -> int:
    """Resident bytes; 0 where it is gone."""
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


async def _started(block: Mapping[str, Any], max_bytes: int) -> _Running:
    """A process that answers. Raises MissingTool without verifiers, RolloutFailed where it does not get so far."""
    folder = Path(tempfile.mkdtemp(prefix="nanodag-verifiers-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    socket, log_path = folder / "http", folder / "log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [str(find_python()), str(SERVER), json.dumps(block), str(socket), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=_environment(),
            start_new_session=True,
        )  # fmt: skip
    transport = httpx.AsyncHTTPTransport(
        uds=str(socket), limits=httpx.Limits(max_connections=None, max_keepalive_connections=64)
    )
    client = httpx.AsyncClient(transport=transport, base_url="http://verifiers", timeout=None)
    running = _Running(process=process, client=client, log_path=log_path, max_bytes=max_bytes)
    atexit.register(running.stop)
    patience = Patience([process.pid], [log_path], START_TIMEOUT_S)
    try:
        while not socket.exists():
            if not running.is_alive or patience.is_over():
                raise RolloutFailed(f"the environment's process does not start: {running.end()}")
            await asyncio.sleep(POLL_S)
        await client.get("/health", timeout=START_TIMEOUT_S)
    except BaseException:
        await running.close()
        raise
    running.watching = asyncio.create_task(running.watch())
    return running


def _environment() -> dict[str, str]:
    """The variables of the process: modules are found where this process finds them."""
    found = [path for path in sys.path if path and "-packages" not in path and not path.startswith(sys.base_prefix)]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    return {**kept, **no_proxy_here(), "PYTHONPATH": os.pathsep.join(found)}


def _end(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LOG_LINES:])[-1500:]
