"""Starts verifiers_server.py in verifiers' environment, and talks to it by HTTP on a Unix socket. No torch here.

A process serves many rollouts at once. One that ends is started again by the next rollout, and one that does not answer
/health any more, or takes too much memory, is ended. Those that were under way in it are lost, with the end of its log
as the reason. One that does not come up is not tried again: its environment cannot be used.

`nanodag env install verifiers` makes the Python environment. verifiers 0.4.0 needs openai < 3, mcp, anthropic and more,
so it is a guest. `verifiers.txt` beside this file is the complete list, without what its cloud sandboxes ask for beyond
that.
"""

import asyncio
import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx

from nanodag.children.child import Child, start_child
from nanodag.children.forks import EpisodeFailed, EpisodeLost
from nanodag.children.tree import KILL, descendants, private_bytes
from nanodag.errors import ConfigError, SourceError
from nanodag.errors.words import size
from nanodag.external_envs.package_environment import PackageEnvironment
from nanodag.host.folders import Scratch
from nanodag.host.ports import no_proxy_here
from nanodag.host.progress_timeout import Patience
from nanodag.host.threads import in_thread

SERVER = Path(__file__).with_name("verifiers_server.py")
START_TIMEOUT_S = 120.0
HEALTH_TIMEOUT_S = 30.0
LOOK_EVERY_S = 1.0
STOP_TIMEOUT_S = 3.0
KILL_TIMEOUT_S = 10.0
POLL_S = 0.05
LOG_LINES = 8
TASKS_TIMEOUT_S = 600.0
MAX_BYTES = 8 << 30
VERIFIERS = PackageEnvironment(
    name="verifiers",
    package="verifiers",
    listed=Path(__file__).with_name("verifiers.txt"),
    variable="NANODAG_VERIFIERS_PYTHON",
    command="nanodag env install verifiers",
)


def find_python() -> Path:
    """The interpreter that has verifiers: the one that NANODAG_VERIFIERS_PYTHON names, else of the environment that
    `install` made. Raises MissingTool where there is none."""
    return VERIFIERS.find_python(who="verifiers lives")


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
    arguments = ["--tasks", *([] if stop is None else [str(stop)])]
    with Scratch("tasks") as folder:
        out_path, log_path = folder / "out", folder / "log"
        with out_path.open("wb") as out:
            child = _spawned(block_of(module, options), *arguments, log_path=log_path, stdout=out)
        try:
            has_ended = child.wait(TASKS_TIMEOUT_S)
        finally:
            child.stop(KILL_TIMEOUT_S, KILL)
        if not has_ended:
            raise SourceError(f"verifiers has not loaded the tasks of {module} in {TASKS_TIMEOUT_S:g} s.")
        if child.code != 0:
            raise SourceError(f"verifiers cannot load the tasks of {module}:\n{_end(child.tail(LOG_LINES))}")
        with out_path.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]


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
        self._failure: ConfigError | None = None

    async def rollout(
        self,
        task: Mapping[str, Any],
        *,
        base_url: str,
        api_key: str,
        model: str,
        sampling: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Result of a rollout of a task against an OpenAI address, as verifiers_server.py spells it out: reward, the
        weighted sum of the rubric's parts; components, the parts without weights; is_cut, a limit ended it; reply, what
        was said last; tokens of all calls, as the address counts them. To cancel this ends it. sampling: what each call
        asks for, by OpenAI's names. Raises EpisodeFailed, EpisodeLost where the process ended, ConfigError where it
        does not come up."""
        request = {"task": dict(task), "base_url": base_url, "api_key": api_key, "model": model}
        reply = await self._answered({**request, "sampling": dict(sampling or {})})
        if reply.status_code != 200:
            raise EpisodeFailed(reply.text[:500])
        outcome: dict[str, Any] = reply.json()
        if not outcome["ok"]:
            raise EpisodeFailed(outcome["error"])
        return outcome

    async def _answered(self, asked: Mapping[str, Any]) -> httpx.Response:
        for is_second in (False, True):
            running = await self._process()
            try:
                return await running.client.post("/rollouts", json=asked)
            except httpx.HTTPError as error:
                # for its exit code: its reaper first ends what it has left
                await in_thread(partial(running.child.wait, KILL_TIMEOUT_S))
                if is_second or running.child.is_alive or not isinstance(error, httpx.ConnectError):
                    raise EpisodeLost(
                        f"{type(error).__name__} of the environment's process: {running.end()}"
                    ) from error
                # It was ending already, so nothing of this one was begun in it.
        raise AssertionError("the second time returns or raises")

    async def close(self) -> None:
        """End the process."""
        if self._running is not None:
            await self._running.close()

    async def _process(self) -> "_Running":
        async with self._starting:
            if self._running is None or not self._running.child.is_alive:
                if self._failure is not None:
                    raise self._failure
                if self._running is not None:
                    await self._running.close()
                try:
                    self._running = await _started(self._block, self._max_bytes)
                except ConfigError as error:
                    self._failure = error
                    raise
            return self._running


@dataclass(kw_only=True)
class _Running:
    child: Child
    client: httpx.AsyncClient
    scratch: Scratch
    max_bytes: int
    fault: str = ""
    watching: "asyncio.Task[None] | None" = None

    def end(self) -> str:
        """Its end in words, with the end of its log."""
        how = "it runs" if self.child.is_alive else f"it ended with code {self.child.code}{self.fault}"
        return f"{how}; the end of its log:\n{_end(self.child.tail(LOG_LINES))}"

    async def watch(self) -> None:
        """Kill it once it takes too much memory, or does not answer any more: code of an environment that blocks holds
        up all of them."""
        while self.child.is_alive:
            if not await _answers(self.client):
                self.kill()
            taken = sum(map(private_bytes, (self.child.pid, *descendants(self.child.pid))))
            if self.child.is_alive and taken > self.max_bytes:
                self.fault = f", as it took {size(taken)} of memory, and max_bytes allows {size(self.max_bytes)}"
                self.kill()
            await asyncio.sleep(LOOK_EVERY_S)

    async def close(self) -> None:
        """End it, and the connections to it."""
        if self.watching is not None:
            self.watching.cancel()
        await self.client.aclose()
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Ask it to end, and kill it where it does not in time."""
        self.child.send(signal.SIGTERM)
        self.child.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End it with all that it started."""
        self.child.stop(KILL_TIMEOUT_S, KILL)


async def _started(block: Mapping[str, Any], max_bytes: int) -> _Running:
    """A process that answers. Raises MissingTool without verifiers, ConfigError where it does not get so far,
    EpisodeLost where somebody killed it before."""
    scratch = Scratch("verifiers")
    socket, log_path = scratch.path / "http", scratch.path / "log"
    child = _spawned(block, str(socket), log_path=log_path)
    transport = httpx.AsyncHTTPTransport(
        uds=str(socket), limits=httpx.Limits(max_connections=None, max_keepalive_connections=64)
    )
    client = httpx.AsyncClient(transport=transport, base_url="http://verifiers", timeout=None)
    running = _Running(child=child, client=client, scratch=scratch, max_bytes=max_bytes)
    atexit.register(running.stop)
    patience = Patience([child.pid], [log_path], START_TIMEOUT_S)
    try:
        while not await _answers(client):
            if not running.child.is_alive and child.code == -signal.SIGKILL:  # as the system does when memory is short
                raise EpisodeLost(f"the environment's process was killed before it was up: {running.end()}")
            if not running.child.is_alive or patience.is_over():
                module = block["taskset"]["id"]
                raise ConfigError(
                    f"The verifiers environment {module!r} cannot be used, its process does not start: {running.end()}"
                )
            await asyncio.sleep(POLL_S)
    except BaseException:
        await running.close()
        raise
    running.watching = asyncio.create_task(running.watch())
    return running


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        await client.get("/health", timeout=HEALTH_TIMEOUT_S)
    except httpx.HTTPError:  # its socket may be there before it listens
        return False
    return True


def _spawned(block: Mapping[str, Any], *where: str, log_path: Path, **how: Any) -> Child:
    """The server's process, which reads its block from standard input. It is the reaper of all that it starts."""
    return start_child(
        [str(find_python()), str(SERVER), str(os.getpid()), *where],
        given=json.dumps(block).encode(), log_path=log_path, environment=_environment(), **how,
    )  # fmt: skip


def _environment() -> dict[str, str]:
    """The variables of the process: modules are found where this process finds them."""
    paths = [path for path in sys.path if path and "-packages" not in path and not path.startswith(sys.base_prefix)]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    return {**kept, **no_proxy_here(), "PYTHONPATH": os.pathsep.join(paths)}


def _end(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LOG_LINES:])[-1500:]
